"""Scores are what plain transformers computes over whole texts, whatever path the tokens took."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.eval.choice_sets import Item
from engine.eval.held_out import turns_of
from engine.eval.scoring import (
    Turn,
    choose,
    force_dense,
    log_likelihoods,
    ratio,
    record,
    score_chats,
    score_choices,
    wilson,
)
from engine.train.chats import Chat
from tests.streaming import open_engine, reference

PROMPT = [9, 100, 31, 7, 250]
CHATS = [
    [Turn(PROMPT, [12, 44, 180, 3]), Turn([*PROMPT, 12, 44, 180, 3, 77, 5], [160, 23, 5])],
    [Turn([5, 6, 7], [80])],
    [Turn([200, 201, 300, 17], [90, 91, 92, 93, 2])],
]


def nothing() -> None:
    """A progress bar that shows nothing."""


def whole_text(model: torch.nn.Module, turn: Turn) -> Tensor:
    """log-probabilities [len(reply), V] from one forward over the whole text."""
    with torch.inference_mode():
        logits = model(torch.tensor([turn.prompt + turn.reply])).logits[0].float()
    return logits.log_softmax(-1)[len(turn.prompt) - 1 : -1]


@pytest.fixture(scope="module")
def models(checkpoint):
    """Two models of one vocabulary: the reference and the one that is scored."""
    return reference(checkpoint("mixtral")), reference(checkpoint("qwen2_moe"))


def test_forcing_gives_the_distribution_of_every_reply_token(models):
    for turn in CHATS[0]:
        rows = force_dense(models[0])(turn.prompt, turn.reply)
        torch.testing.assert_close(rows.log_softmax(-1), whole_text(models[0], turn))


def test_an_engine_is_scored_like_the_checkpoint_it_was_made_from(checkpoint, store, models, tmp_path):
    record(force_dense(models[0]), CHATS, tmp_path, nothing)
    wanted = score_chats(force_dense(models[1]), CHATS, tmp_path, nothing)
    with open_engine(store("qwen2_moe"), slots=9) as engine:
        got = score_chats(engine.force, CHATS, tmp_path, nothing)
    assert got.kl == pytest.approx(wanted.kl, rel=1e-3)
    assert got.perplexity == pytest.approx(wanted.perplexity, rel=1e-3)
    assert (got.tokens, got.chats) == (13, 3)


def test_chat_scores_are_those_of_whole_texts(models, tmp_path):
    dense = force_dense(models[0])
    record(dense, CHATS, tmp_path, nothing)
    score = score_chats(force_dense(models[1]), CHATS, tmp_path, nothing)
    turns = [turn for chat in CHATS for turn in chat]
    p, q = (torch.cat([whole_text(model, turn) for turn in turns]) for model in models)
    said = torch.tensor([token for turn in turns for token in turn.reply])[:, None]
    divergence = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert score.kl == pytest.approx(divergence.mean().item(), rel=1e-5)
    assert score.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    assert score.perplexity == pytest.approx(math.exp(-q.gather(1, said).mean()), rel=1e-5)
    assert score.reference_perplexity == pytest.approx(math.exp(-p.gather(1, said).mean()), rel=1e-5)
    sums, counts = [part.sum().item() for part in divergence.split([7, 1, 5])], [7, 1, 5]
    residual = [(s - score.kl * n) ** 2 for s, n in zip(sums, counts)]
    assert score.kl_error == pytest.approx(math.sqrt(sum(residual) * 3 / 2) / 13, rel=1e-4)


def test_a_model_that_is_its_own_reference_differs_by_nothing(models, tmp_path):
    dense = force_dense(models[0])
    record(dense, CHATS, tmp_path, nothing)
    score = score_chats(dense, CHATS, tmp_path, nothing)
    assert (score.kl, score.kl_error, score.top1, score.top1_error) == (0, 0, 1, 0)
    assert score.perplexity == score.reference_perplexity


def test_the_error_of_a_ratio_is_that_of_a_mean_where_clusters_are_equal():
    values, counts = torch.tensor([3.0, 5.0, 10.0, 6.0]), torch.full((4,), 2.0)
    estimate, error = ratio(values, counts)
    assert estimate == pytest.approx(3.0)
    assert error == pytest.approx((values / 2).std().item() / 2)
    assert ratio(values[:1], counts[:1]) == (1.5, None)


def test_options_are_scored_by_the_sum_of_their_tokens(models):
    """Also those that are served by what was forced for another one, and an option that begins another one."""
    options = [[20, 21, 22], [20, 21, 40, 41], [20, 21, 40], [20, 50], [20], [60, 61, 62]]
    calls = []

    def force(prompt: list[int], reply: list[int]) -> Tensor:
        calls.append(reply)
        return force_dense(models[0])(prompt, reply)

    got = log_likelihoods(force, PROMPT, options)
    for option, score in zip(options, got):
        rows = whole_text(models[0], Turn(PROMPT, option))
        assert score == pytest.approx(rows.gather(1, torch.tensor(option)[:, None]).sum().item(), rel=1e-5)
    assert calls == [[20, 21, 40, 41], [60, 61, 62]]


def test_the_likeliest_option_is_chosen(models):
    options = [[20, 21], [30, 31], [40, 41]]
    scores = log_likelihoods(force_dense(models[0]), PROMPT, options)
    assert choose(force_dense(models[0]), [(PROMPT, options)], nothing) == [scores.index(max(scores))]


def test_figures_of_a_set():
    items = [Item("?", ("a", "b"), 0), Item("?", ("a", "b"), 1), Item("?", ("a", "b", "c", "d"), 3)]
    score = score_choices("letters", items, chosen=[0, 0, 3], reference=[0, 1, 2])
    assert (score.items, score.accuracy, score.reference) == (3, 2 / 3, 2 / 3)
    assert score.chance == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    assert score.alike == pytest.approx(1 / 3)
    assert score.low < score.accuracy < score.high


def test_wilson_intervals():
    """The bounds solve (p - share)² = z² p (1 - p) / n."""
    for hits, count in ((0, 10), (7, 10), (150, 200), (200, 200)):
        for bound in wilson(hits, count):
            assert (bound - hits / count) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / count, abs=1e-9)
    assert wilson(10, 10)[1] == pytest.approx(1)


def test_a_chat_is_split_into_its_replies():
    ids = torch.arange(100, 112)
    chat = Chat(ids, torch.tensor([2, 3, 7, 8, 9, 10]), *[torch.zeros(6, 1)] * 2)
    assert turns_of(chat) == [
        Turn([100, 101, 102], [103, 104]),
        Turn(list(range(100, 108)), [108, 109, 110, 111]),
    ]
