"""Greedy tokens are the same for every expert memory, prefetch and history of requests: those of plain transformers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine import GenerationConfig
from engine.store.layout import read_info
from tests.streaming import PROMPT, REPETITION, greedy, open_engine, reference, reference_greedy

CHUNK = 8
LONG = [*PROMPT, *range(60, 90)]  # over several chunks and sliding windows
EDITED = [*LONG[:20], *range(200, 215)]  # shares two chunks and a half
GREEDY = GenerationConfig(max_tokens=12, temperature=0, repetition_penalty=REPETITION)
# Full attention, sliding windows, recurrent layers of two kinds, latent attention.
KINDS = ["qwen2_moe", "gpt_oss", "qwen3_5_moe", "bailing_hybrid", "deepseek_v2"]


class StopAfter(threading.Event):
    """Set from the n-th look on."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture(scope="module")
def expected(checkpoint):
    """expected(kind)(prompt) -> transformers' greedy tokens, each computed once."""
    models, known = {}, {}

    def of(kind: str):
        models.setdefault(kind, reference(checkpoint(kind)))

        def tokens(prompt: list[int]) -> list[int]:
            key = (kind, *prompt)
            if key not in known:
                known[key] = reference_greedy(models[kind], prompt)
            return known[key]

        return tokens

    return of


def budgets(directory) -> list[int | None]:
    """From the least to all: k slots, a few more, half, all but one, all."""
    info = read_info(directory)
    total = len(info.layers) * info.experts
    return [info.top_k, info.top_k + 2, total // 2, total - 1, None]


CASES = [
    (kind, step, prefetch)
    for kind in KINDS
    for step in (range(4) if kind in ("qwen2_moe", "gpt_oss") else (0, 2))
    for prefetch in ("none", "gate")
]
CASES += [(kind, 4, "none") for kind in KINDS]


@pytest.mark.parametrize(("kind", "step", "prefetch"), CASES)
def test_tokens_are_those_of_transformers(kind, step, prefetch, store, expected):
    directory, wanted = store(kind), expected(kind)
    with open_engine(directory, budgets(directory)[step], prefetch, chunk=CHUNK) as engine:
        assert greedy(engine, LONG) == wanted(LONG)  # cold
        assert greedy(engine, LONG) == wanted(LONG)  # again: regenerate
        assert greedy(engine, EDITED) == wanted(EDITED)
        turn = [*EDITED, *wanted(EDITED), 5, 6, 7]
        assert greedy(engine, turn) == wanted(turn)  # next turn
        stopped = list(engine.complete(LONG, GREEDY, StopAfter(2)))  # in prefill
        assert [chunk.finish_reason for chunk in stopped] == ["stopped"]
        engine.settle()
        assert greedy(engine, LONG) == wanted(LONG)  # warm
        replies = engine.complete(PROMPT, GREEDY)
        begun = [next(replies).token_ids[0] for _ in range(3)]
        replies.close()  # in decode
        assert begun == wanted(PROMPT)[:3]
        assert greedy(engine, PROMPT) == wanted(PROMPT)
        assert engine.stats().dropped == 0


@pytest.mark.parametrize("experts", ["bf16", "int8", "int4"])
def test_rounding_does_not_depend_on_the_memory_either(experts, store):
    """A bf16 model with quantised experts: no reference but itself, all resident."""
    directory, wanted = store("qwen2_moe", experts, torch.bfloat16), None
    for slots in (None, 12, 3):
        for prefetch in ("none", "gate"):
            with open_engine(directory, slots, prefetch, chunk=CHUNK) as engine:
                got = [greedy(engine, prompt) for prompt in (LONG, EDITED, PROMPT, LONG)]
            wanted = wanted or got
            assert got == wanted


def test_changing_settings_between_requests_changes_no_token(store, expected):
    directory, wanted = store("qwen2_moe"), expected("qwen2_moe")
    record = read_info(directory).layout.record_bytes
    with open_engine(directory, 3, chunk=CHUNK) as engine:
        for memory, prefetch in ((10 * record, "gate"), ("100%", None), (3 * record, "none"), ("50%", "gate")):
            assert greedy(engine, LONG) == wanted(LONG)
            engine.configure(expert_memory=memory, prefetch=prefetch)
            assert greedy(engine, EDITED) == wanted(EDITED)


def test_stop_ends_a_reply_within_a_token(store, expected):
    with open_engine(store("qwen2_moe"), 3) as engine:
        stop, chunks = threading.Event(), []
        for chunk in engine.complete(PROMPT, GREEDY, stop):
            chunks.append(chunk)
            if len(chunks) == 4:
                stop.set()
        assert len(chunks) == 5
        assert chunks[-1].finish_reason == "stopped"
        assert greedy(engine) == expected("qwen2_moe")(PROMPT)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_5_moe"])
def test_a_reply_may_be_drawn_from_any_thread(kind, store, expected):
    """A web server asks for each piece from whatever worker is free."""
    with open_engine(store(kind), 5, "gate") as engine:
        engine.stats()
        replies, tokens = engine.complete(PROMPT, GREEDY), []
        while True:
            with ThreadPoolExecutor(1) as worker:
                chunk = worker.submit(next, replies).result(60)
            tokens += chunk.token_ids
            if chunk.finish_reason:
                break
        assert list(replies) == []
        assert tokens == expected(kind)(PROMPT)
        assert greedy(engine, [*PROMPT, *tokens, 9]) == expected(kind)([*PROMPT, *tokens, 9])


def test_the_consumer_is_not_put_into_inference_mode(store):
    with open_engine(store("qwen2_moe"), 3) as engine:
        for _ in engine.complete(PROMPT, GREEDY):
            assert not torch.is_inference_mode_enabled()
            weight = torch.ones(2, requires_grad=True)
            weight.sum().backward()
            assert weight.grad is not None
