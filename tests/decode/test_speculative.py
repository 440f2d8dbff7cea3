"""Speculation says what the target would have said, whatever the draft proposes, and leaves the cache with what was said."""

from __future__ import annotations

import math
import threading
from collections import Counter
from itertools import islice, product

import pytest
import torch
from torch import nn

from engine import GenerationConfig
from engine.decode.plain import Stopped
from engine.decode.sampling import Sampler
from engine.decode.speculative import Tally, speculate

CPU = torch.device("cpu")
RARE = 3.7  # normal quantile: a right rule exceeds the bound once in ten thousand times


def excess(counts: Counter, expected: dict, draws: int) -> float:
    """Chi-square of `counts` against probabilities `expected`, relative to its bound (Wilson and Hilferty, 1931); a draw
    that is impossible counts as infinitely much. Cells that are expected less than five times are taken together."""
    if any(expected.get(cell, 0) == 0 for cell in counts):
        return math.inf
    large = [cell for cell, p in expected.items() if p * draws >= 5]
    cells = [(counts[cell], expected[cell] * draws) for cell in large]
    rest = draws - sum(count for count, _ in cells), draws - sum(wanted for _, wanted in cells)
    if rest[1] >= 1:
        cells.append(rest)
    chi, free = sum((count - wanted) ** 2 / wanted for count, wanted in cells), max(1, len(cells) - 1)
    return chi / (free * (1 - 2 / (9 * free) + RARE * (2 / (9 * free)) ** 0.5) ** 3)


class AlwaysAccepts(Sampler):
    def accept(self, p, q, token) -> bool:
        return True


class DrawsFromTheTarget(Sampler):
    """Not from what the draft left of it."""

    def instead(self, p, q) -> int:
        return self.draw(p)


# -- the rule --------------------------------------------------------------------------------------------------------

P = [0.4, 0.3, 0.2, 0.06, 0.04]
PAIRS = {
    "equal": (P, P),
    "near": (P, [0.35, 0.33, 0.22, 0.05, 0.05]),
    "far": (P, [0.02, 0.03, 0.05, 0.1, 0.8]),
    "disjoint": ([0.5, 0.5, 0, 0, 0], [0, 0, 0.2, 0.3, 0.5]),
    "within": (P, [0, 1, 0, 0, 0]),
    "around": ([0, 0, 1, 0, 0], P),
}


def rule_excess(rule: type[Sampler], p: torch.Tensor, q: torch.Tensor, draws: int = 2500) -> float:
    sampler, counts = rule(GenerationConfig(temperature=1, seed=11), CPU), Counter()
    for _ in range(draws):
        token = sampler.draw(q)
        counts[token if sampler.accept(p, q, token) else sampler.instead(p, q)] += 1
    return excess(counts, dict(enumerate(p[0].double().tolist())), draws)


@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_accepted_or_put_in_its_place_is_drawn_from_the_target(pair):
    p, q = (torch.tensor([row], dtype=torch.float32) for row in PAIRS[pair])
    assert rule_excess(Sampler, p, q) < 1


@pytest.mark.parametrize("seed", range(3))
def test_the_same_with_random_distributions_behind_filters(seed):
    sampler = Sampler(GenerationConfig(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02), CPU)
    generator = torch.Generator().manual_seed(seed)
    p, q = (sampler.probabilities(2 * torch.randn(1, 12, generator=generator), []) for _ in range(2))
    assert (p == 0).any() and (q == 0).any()
    assert rule_excess(Sampler, p, q) < 1


@pytest.mark.parametrize("rule", [AlwaysAccepts, DrawsFromTheTarget])
def test_a_wrong_rule_is_told_from_a_right_one(rule):
    p, q = (torch.tensor([row], dtype=torch.float32) for row in PAIRS["far"])
    assert rule_excess(rule, p, q) > 5


# -- the loop --------------------------------------------------------------------------------------------------------

VOCABULARY = 4


class Cache:
    """A conversation whose cache is the list of the tokens in it. stiff: it cannot be cropped, only put back."""

    def __init__(self, prompt: list[int], stiff: bool = False) -> None:
        self.cache, self.ids, self.stiff = list(prompt), list(prompt), stiff

    def mark(self) -> dict[int, object]:
        return {0: list(self.cache)} if self.stiff else {}

    def take_back(self, tokens: int, mark: dict[int, object]) -> None:
        if tokens:
            assert bool(mark) or not self.stiff
            kept = len(self.cache) - tokens
            assert not mark or mark[0] == self.cache[:kept]
            del self.cache[kept:]

    def append(self, ids: list[int], prefill: bool) -> None:
        self.ids += ids
        assert self.ids == self.cache[: len(self.ids)]

    def settle(self, ahead: int, kept: int, mark: dict[int, object]) -> None:
        if ahead:
            self.take_back(ahead + (kept if mark else 0), mark)
            self.ids = self.ids[: len(self.cache)]


class Bigrams(nn.Module):
    """Logits are a function of the last token: of the target's table [V, V], or of the draft's while `drafting`."""

    def __init__(self, target: torch.Tensor, draft: torch.Tensor) -> None:
        super().__init__()
        self.target, self.draft = nn.Parameter(target), nn.Parameter(draft)
        self.drafting = False
        self.forwards: list[tuple[bool, int]] = []

    def forward(self, input_ids, use_cache, logits_to_keep, past_key_values):
        past_key_values += input_ids[0].tolist()
        self.forwards.append((self.drafting, input_ids.shape[1]))
        self.logits = (self.draft if self.drafting else self.target)[input_ids[:, logits_to_keep]]
        return self

    def begin(self, early: bool) -> None:
        assert not self.drafting
        self.drafting = True

    def drafted(self, left: int) -> None:
        assert self.drafting and left >= 0

    def end(self) -> None:
        assert self.drafting
        self.drafting = False


class Depth:
    """A governor of always the same depth, or one that ends windows at low confidence."""

    early = True

    def __init__(self, depth: int, least: float = 0.0) -> None:
        self.fixed, self.least = depth, least

    def depth(self, most: int) -> int:
        return min(self.fixed, most)

    def go_on(self, drafted: int, confidence: float) -> bool:
        assert 0 <= confidence <= 1
        return confidence >= self.least


def tables(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target, other = (1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator) for _ in range(2))
    return target, (1 - noise) * target + noise * other


def run(model: Bigrams, cache: Cache, sampler: Sampler, governor, stop=None, limit: int = 64, on_window=None):
    first = model.target.detach()[cache.cache[-1:]]
    return speculate(model, cache, first, sampler, list(cache.cache), limit, stop or threading.Event(), model, governor,
                     on_window or (lambda window: None), lambda tokens, decoding: None)  # fmt: skip


def joint(sampler: Sampler, target: torch.Tensor, start: int, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens after `start`, by the target alone."""
    rows = [sampler.probabilities(target[[i]], [])[0].double().tolist() for i in range(VOCABULARY)]
    return {tokens: math.prod(rows[a][b] for a, b in zip((start, *tokens), tokens))
            for tokens in product(range(VOCABULARY), repeat=length)}  # fmt: skip


def loop_excess(rule: type[Sampler], noise: float, governor, seeds: int = 700, stiff: bool = False, **filters) -> float:
    """Of the first three tokens over so many seeds."""
    target, draft = tables(6, noise)
    model, counts = Bigrams(target, draft), Counter()
    for seed in range(seeds):
        sampler = rule(GenerationConfig(seed=seed, **{"temperature": 1, **filters}), CPU)
        counts[tuple(islice(run(model, Cache([0], stiff), sampler, governor), 3))] += 1
    return excess(counts, joint(sampler, target, 0, 3), seeds)


@pytest.mark.parametrize(("noise", "governor", "stiff", "filters"), [
    (0.0, Depth(2), False, {}),
    (0.3, Depth(2), False, {}),
    (1.0, Depth(2), False, {}),
    (1.0, Depth(2), True, dict(top_k=3, top_p=0.9)),
    (0.5, Depth(3, least=0.5), True, dict(temperature=1.3)),
])  # fmt: skip
def test_sampled_tokens_have_the_targets_joint_distribution(noise, governor, stiff, filters):
    assert loop_excess(Sampler, noise, governor, stiff=stiff, **filters) < 1


@pytest.mark.parametrize("rule", [AlwaysAccepts, DrawsFromTheTarget])
def test_a_loop_with_a_wrong_rule_is_found_out(rule):
    assert loop_excess(rule, 1.0, Depth(2)) > 2


@pytest.mark.parametrize("stiff", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_greedy_tokens_are_the_targets_and_the_cache_holds_what_was_said(depth, noise, stiff):
    target, draft = tables(3, noise)
    wanted = [int(target[2].argmax())]
    while len(wanted) < 21:
        wanted.append(int(target[wanted[-1]].argmax()))
    for said in range(1, 21):  # the generator is closed inside windows and between them
        model, cache = Bigrams(target, draft), Cache([1, 2], stiff)
        tokens = run(model, cache, Sampler(GenerationConfig(temperature=0), CPU), Depth(depth))
        assert list(islice(tokens, said)) == wanted[:said]
        tokens.close()
        assert not model.drafting
        assert cache.ids == cache.cache
        assert cache.cache == [1, 2, *wanted][: len(cache.cache)]
        assert len(cache.cache) == 2 + said - 1 or stiff and len(cache.cache) >= 2 + said - 1 - depth


def test_a_perfect_draft_is_accepted_whole():
    windows = []
    tokens = run(Bigrams(*tables(3, 0.0)), Cache([2]), Sampler(GenerationConfig(temperature=0), CPU), Depth(4),
                 on_window=windows.append)  # fmt: skip
    assert len(list(islice(tokens, 11))) == 11
    assert [(window.proposed, window.accepted) for window in windows] == [(4, 4), (4, 4)]


def test_no_more_is_drafted_than_may_be_said():
    model = Bigrams(*tables(3, 0.0))
    tokens = run(model, Cache([2]), Sampler(GenerationConfig(temperature=0), CPU), Depth(8), limit=4)
    assert len(list(islice(tokens, 4))) == 4
    assert model.forwards == [(True, 1), (True, 1), (False, 3)]


def test_low_confidence_ends_a_window():
    model, windows = Bigrams(*tables(3, 0.0)), []
    sampler = Sampler(GenerationConfig(temperature=1, seed=0), CPU)
    tokens = run(model, Cache([2]), sampler, Depth(8, least=1.0), on_window=windows.append)
    list(islice(tokens, 9))
    assert {window.proposed for window in windows} == {1}


@pytest.mark.parametrize("stiff", [False, True])
@pytest.mark.parametrize("at", range(1, 6))
def test_stop_is_heard_before_the_next_draft_token(at, stiff):
    model, cache, stop = Bigrams(*tables(3, 0.0)), Cache([2], stiff), threading.Event()
    tokens = run(model, cache, Sampler(GenerationConfig(temperature=0), CPU), Depth(8), stop)
    model.register_forward_hook(lambda *_: stop.set() if len(model.forwards) == at else None)
    assert next(tokens) == int(model.target[2].argmax())
    with pytest.raises(Stopped):
        next(tokens)
    assert model.forwards == [(True, 1)] * at
    assert not model.drafting
    assert cache.cache == cache.ids == [2]


def test_an_error_while_drafting_ends_drafting():
    model, cache = Bigrams(*tables(3, 0.0)), Cache([2])

    def fail(*_) -> None:
        raise RuntimeError("out of luck")

    tokens = run(model, cache, Sampler(GenerationConfig(temperature=0), CPU), Depth(8))
    next(tokens)
    model.drafted = fail
    with pytest.raises(RuntimeError, match="out of luck"):
        next(tokens)
    assert not model.drafting


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_repetition_is_punished_for_proposals_too(noise):
    """The tokens are those of a loop without speculation; a draft that is the target is accepted whole."""
    target, draft = tables(3, noise)
    sampler, windows, wanted = Sampler(GenerationConfig(temperature=0, repetition_penalty=1.7), CPU), [], [2]
    for _ in range(13):
        wanted.append(sampler.choose(target[wanted[-1:]], wanted))
    tokens = run(Bigrams(target, draft), Cache([2]), sampler, Depth(3), on_window=windows.append)
    assert list(islice(tokens, 13)) == wanted[1:]
    assert noise or [window.accepted for window in windows] == [3, 3, 3]


# -- the tally -------------------------------------------------------------------------------------------------------


def test_the_tally_counts_windows_and_positions():
    tally, windows = Tally(), []
    tokens = run(Bigrams(*tables(3, 0.6)), Cache([2]), Sampler(GenerationConfig(temperature=1, seed=1), CPU), Depth(3),
                 on_window=lambda window: (windows.append(window), tally.add(window)))  # fmt: skip
    list(islice(tokens, 60))
    assert [tally.accepted[a] for a in range(4)] == [sum(w.accepted == a for w in windows) for a in range(4)]
    for i, share in enumerate(tally.by_position()):
        reached = [w for w in windows if w.accepted >= i]
        assert share == sum(w.accepted > i for w in reached) / len(reached)
    assert tally.draft_s == sum(w.draft_s for w in windows) and tally.verify_s == sum(w.verify_s for w in windows)
