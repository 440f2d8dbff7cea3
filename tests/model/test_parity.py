"""The streamed model's logits are plain transformers' logits, whatever fits into the slots."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from engine.model.skeleton import cache_argument
from engine.store.layout import read_info
from tests.streaming import error_of, open_engine, reference, streamed, use_stored_experts
from tests.tiny_models import CONFIGS

ROUNDING = 1e-4  # of the largest logit: fp32 sums in another order
# Of the logits' norm. The packed kernels round activations to bf16, which may even change a close routing; without
# routing, in test_experts.py, the bound is 0.01. Random weights are the hardest to quantise.
PACKED, QUANTISED = 0.15, {"int8": 0.12, "int4": 0.4}


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 320, (batch, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def logits(model, prefill: list[torch.Tensor], decoded: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each prompt alone, then of `decoded` [1, n] taken in as a prompt of 7 and token by token on the cache."""
    results = [model(input_ids=prompt).logits for prompt in prefill]
    cache = DynamicCache(config=model.config)
    for piece in (decoded[:, :7], *decoded[:, 7:].split(1, dim=1)):
        results.append(model(input_ids=piece, use_cache=True, **{cache_argument(model): cache}).logits)
    return results


PROMPTS = [ids(1, 1), ids(1, 2), ids(1, 9), ids(1, 33), ids(3, 6)]
DECODED = ids(1, 12)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_bf16_store_gives_the_logits_of_transformers(kind, checkpoint, store):
    expected = logits(reference(checkpoint(kind)), PROMPTS, DECODED)
    directory = store(kind)
    for slots in (read_info(directory).top_k, None):
        with open_engine(directory, slots, "gate") as engine:
            for got, wanted in zip(logits(streamed(engine), PROMPTS, DECODED), expected, strict=True):
                assert torch.isfinite(wanted).all()
                assert (got - wanted).abs().max() <= ROUNDING * wanted.abs().max()
            assert engine.stats().dropped == 0


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("experts", ["int8", "int4"])
def test_quantised_experts_compute_what_their_record_stands_for(kind, experts, checkpoint, store):
    directory, original = store(kind, experts), reference(checkpoint(kind))
    exact = torch.cat([x.flatten() for x in logits(original, PROMPTS, DECODED)])
    dequantised = torch.cat([x.flatten() for x in logits(use_stored_experts(original, directory), PROMPTS, DECODED)])
    with open_engine(directory, read_info(directory).top_k) as engine:
        got = torch.cat([x.flatten() for x in logits(streamed(engine), PROMPTS, DECODED)])
    assert error_of(got, dequantised) < PACKED
    assert error_of(got, exact) < QUANTISED[experts]
    assert error_of(dequantised, exact) > 0  # or the test would compare the original with itself
