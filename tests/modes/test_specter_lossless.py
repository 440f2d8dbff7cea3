"""Specter mode says what plain decoding says, whatever the draft, the depth and the memory."""

from __future__ import annotations

import random

import pytest
import torch

from engine import GenerationConfig, Mode
from engine.store.layout import read_info
from tests.specter import BAD, FAIR, GOOD, LONG, divergence, drafted_copy, memory, reply
from tests.streaming import PROMPT, greedy

# Full attention with and without shared experts, latent attention, sliding windows, biases, recurrent layers of two kinds.
KINDS = ["mixtral", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_5_moe", "bailing_hybrid"]
DEPTHS = [(GOOD, 1), (GOOD, 3), (GOOD, 8), (GOOD, "auto"), (FAIR, 3), (BAD, 3), (BAD, "auto")]
TOKENS = 10  # shorter than what makes an engine reconsider whether to keep its draft in memory


def prompts(kind: str, count: int = 7) -> list[list[int]]:
    choice = random.Random(kind)
    return [choice.choices(range(3, 320), k=choice.randint(3, 24)) for _ in range(count)]  # windows are 16 long


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(kind, drafted, plain, specter):
    """Of seven prompts an architecture, each in two of the seven settings."""
    directory, engine, asked = drafted(kind), plain(kind), prompts(kind)
    wanted = [greedy(engine, prompt, TOKENS) for prompt in asked]
    speculating, proposed, partings = specter(directory), 0, []
    for i, (bits, depth) in enumerate(DEPTHS):
        speculating.configure(depth=depth, draft_bits=bits, expert_memory=memory(directory, None, bits))
        for n in (i, (i + 1) % len(asked)):
            parting = divergence(engine, asked[n], greedy(speculating, asked[n], TOKENS), wanted[n])
            if parting:
                partings.append(f"prompt {n}, {bits} bits, depth {depth}: {parting}")
            stats = speculating.stats()
            assert stats.dropped == 0 and not stats.draft_parked
            proposed += len(stats.acceptance_by_position) > 0
    assert not partings, "\n".join(partings)
    assert proposed > len(DEPTHS)  # speculation took place


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_5_moe"])
def test_tokens_do_not_depend_on_the_memory(kind, drafted, plain, specter):
    directory, info, partings = drafted(kind), read_info(drafted(kind)), []
    asked = [LONG[:9], LONG]
    wanted = [greedy(plain(kind), prompt, TOKENS) for prompt in asked]
    engine = specter(directory)
    for slots in (info.top_k, len(info.layers) * info.experts // 2, len(info.layers) * info.experts):
        for prefetch in ("none", "gate"):
            engine.configure(expert_memory=memory(directory, slots), prefetch=prefetch)
            engine.reset()
            assert engine.plan.slots == slots
            partings += [divergence(plain(kind), prompt, greedy(engine, prompt, TOKENS), tokens)
                         for prompt, tokens in zip(asked, wanted)]  # fmt: skip
            assert engine.stats().dropped == 0
    assert partings == [None] * len(partings)


def test_tokens_are_the_same_over_an_emulated_link(drafted, plain, specter):
    engine = specter(drafted(), device="cpu", emulated_link="50MB")
    assert greedy(engine) == greedy(plain())
    assert (engine.stats().link, engine.stats().dropped) == ("emulated", 0)


def test_a_bf16_model_says_the_same_but_for_near_ties(checkpoint, store, tmp_path, specter):
    """Rows of a batch are rounded as rows of one where the kernels do not depend on their number."""
    directory = drafted_copy(store("qwen2_moe", "bf16", torch.bfloat16), tmp_path / "store", GOOD)
    engine, asked = specter(directory), prompts("bf16", 4)
    speculated = [greedy(engine, prompt, TOKENS) for prompt in asked]
    engine.configure(mode=Mode.ON_DEMAND)
    engine.reset()
    decoded = [greedy(engine, prompt, TOKENS) for prompt in asked]
    partings = [divergence(engine, prompt, got, wanted) for prompt, got, wanted in zip(asked, speculated, decoded)]
    assert partings == [None] * len(asked)


def test_a_seed_reproduces_a_sampled_reply(drafted, specter):
    engine, config = specter(drafted()), GenerationConfig(max_tokens=12, temperature=1, top_p=0.9, seed=3)
    first = reply(engine, PROMPT, config)
    engine.reset()
    assert reply(engine, PROMPT, config) == first
    assert reply(engine, PROMPT, GenerationConfig(max_tokens=12, temperature=1, top_p=0.9, seed=4)) != first
