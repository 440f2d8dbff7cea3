"""A conversation reuses what gives the tokens of a fresh run, and nothing else, whatever happened before."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from engine.decode.plain import Stopped, forward, prefill
from engine.decode.reuse import Conversation
from engine.memory.kv import cache_bytes
from tests.streaming import reference

CHUNK = 8
# Full attention, sliding windows (16), recurrent layers of two kinds, latent attention.
KINDS = ["qwen2_moe", "gpt_oss", "qwen3_5_moe", "bailing_hybrid", "deepseek_v3"]


@pytest.fixture(scope="module")
def model(request, checkpoint):
    return reference(checkpoint(request.param))


def ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 320), k=length)


class Run:
    """Requests on one conversation, each greedy for a few tokens."""

    def __init__(self, model, chunk: int = CHUNK) -> None:
        self.model, self.conversation = model, Conversation(model.config, chunk)
        self.reused = 0

    @torch.inference_mode()
    def request(self, prompt: list[int], tokens: int = 5, stop_after: int | None = None) -> list[int]:
        """Greedy tokens after `prompt`; stop_after: chunks of the prefill after which it is stopped."""
        stop, chunks = threading.Event(), 0
        if stop_after == 0:
            stop.set()

        def on_forward(_: int, decoding: bool) -> None:
            nonlocal chunks
            chunks += 1
            if chunks == stop_after:
                stop.set()

        logits, self.reused = prefill(self.model, self.conversation, list(prompt), stop, on_forward)
        result = []
        for _ in range(tokens):
            result.append(int(logits.argmax()))
            logits = forward(self.model, self.conversation, result[-1:])
            self.conversation.append(result[-1:], prefill=False)
        return result[:tokens]


def fresh(model, prompt: list[int]) -> list[int]:
    return Run(model).request(prompt)


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_requests_in_any_order_give_the_tokens_of_fresh_ones(model):
    """Turns, regenerations, edits, other conversations and stops, at random: the tokens are always those of a new cache."""
    run, choice = Run(model), random.Random(3)
    prompt, expected = ids(19, 0), {}
    for step in range(14):
        kind = choice.choice(["again", "turn", "edit", "shorter", "other", "stop"])
        if kind == "turn":
            prompt = [*run.conversation.ids, *ids(choice.randint(1, 20), step)]
        elif kind == "edit":
            keep = choice.randint(0, len(prompt))
            prompt = [*prompt[:keep], *ids(choice.randint(1, 20), step)]
        elif kind == "shorter":
            prompt = prompt[: choice.randint(1, len(prompt))]
        elif kind == "other":
            prompt = ids(choice.randint(1, 40), step)
        elif kind == "stop":
            longer = [*prompt, *ids(30, step)]
            with pytest.raises(Stopped):
                run.request(longer, stop_after=choice.randint(0, 2))
        prompt = prompt[:90]
        if tuple(prompt) not in expected:
            expected[tuple(prompt)] = fresh(model, prompt)
        assert run.request(prompt) == expected[tuple(prompt)], (step, kind)


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_the_last_prompt_after_another_one_was_stopped(model):
    run, prompt = Run(model), ids(19, 1)
    reply = run.request(prompt)
    for stop_after in (0, 1):
        with pytest.raises(Stopped):
            run.request([*prompt[:17], *ids(30, 2)], stop_after=stop_after)
        assert run.request(prompt) == reply


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_the_next_turn_costs_its_new_tokens_only(model):
    run, prompt = Run(model), ids(19, 1)
    reply = run.request(prompt)
    held = len(run.conversation.ids)
    assert held == len(prompt) + len(reply)
    run.request([*prompt, *reply, *ids(9, 2)])
    assert run.reused == held


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_regenerating_reuses_the_whole_prompt(model):
    run, prompt = Run(model), ids(19, 1)
    reply = run.request(prompt, tokens=20)  # past a sliding window
    for _ in range(2):
        assert run.request(prompt, tokens=20) == reply
        assert run.reused == len(prompt)


@pytest.mark.parametrize("model", ["qwen2_moe", "deepseek_v3"], indirect=True)
def test_an_edit_reuses_whole_chunks_of_the_common_prefix(model):
    run, prompt = Run(model), ids(30, 1)
    run.request(prompt)
    edited = [*prompt[:21], *ids(9, 5)]
    assert run.request(edited) == fresh(model, edited)
    assert run.reused == 16


@pytest.mark.parametrize("model", ["qwen3_5_moe"], indirect=True)
def test_recurrent_layers_go_back_to_the_last_chunk_border(model):
    run, prompt = Run(model), ids(30, 1)
    run.request(prompt)
    edited = [*prompt[:27], *ids(9, 5)]
    assert run.request(edited) == fresh(model, edited)
    assert run.reused == 24
    run.request([*prompt[:10], *ids(9, 5)])
    assert run.reused == 0  # no copy from so far back is kept


@pytest.mark.parametrize("model", ["qwen2_moe"], indirect=True)
def test_another_conversation_starts_anew(model):
    run = Run(model)
    run.request(ids(30, 1))
    run.request(ids(30, 2))
    assert run.reused == 0
    run.conversation.forget()
    assert (run.conversation.ids, run.conversation.bytes()) == ([], 0)


@pytest.mark.parametrize("model", ["qwen2_moe"], indirect=True)
def test_what_was_decoded_is_not_taken_for_prefilled(model):
    """A reply's cache was computed token by token: an edit behind it starts from chunks of the prompt alone."""
    run, prompt = Run(model), ids(10, 1)
    reply = run.request(prompt, tokens=20)
    run.request([*prompt, *reply, 7, 8, 9])
    edited = [*prompt, *reply, 7, 8, 10, 11]
    assert run.request(edited) == fresh(model, edited)
    assert run.reused == 8


@pytest.mark.parametrize("model", ["qwen3_5_moe", "gpt_oss"], indirect=True)
def test_the_bytes_of_copies_are_counted(model):
    run = Run(model)
    run.request(ids(30, 1), tokens=1)
    assert run.conversation.bytes() > cache_bytes(run.conversation.cache)


def test_pieces_end_at_chunk_borders():
    conversation = Conversation.__new__(Conversation)
    conversation.chunk, conversation.ids = 8, [0] * 11
    assert [len(piece) for piece in conversation.pieces([0] * 30)] == [5, 8, 6]
    assert conversation.pieces([0] * 11) == []
