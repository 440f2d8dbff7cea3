"""Sampling follows its settings: seeds reproduce, filters leave only what they allow, greedy asks nobody."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine import ConfigError, GenerationConfig
from engine.decode.sampling import Sampler

CPU = torch.device("cpu")
LOGITS = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]))


def sampler(**settings) -> Sampler:
    return Sampler(GenerationConfig(**settings), CPU)


def draw(count: int, **settings) -> list[int]:
    chooser = sampler(**settings)
    return [chooser.choose(LOGITS, []) for _ in range(count)]


def test_a_seed_reproduces_and_another_does_not():
    assert draw(50, seed=7, temperature=1) == draw(50, seed=7, temperature=1)
    assert draw(50, seed=7, temperature=1) != draw(50, seed=8, temperature=1)
    assert draw(50, temperature=1) != draw(50, temperature=1)


def test_greedy_takes_the_likeliest_whatever_the_seed():
    assert {*draw(5, temperature=0, seed=1), *draw(5, temperature=0, seed=2)} == {0}
    assert sampler(temperature=0, top_k=1, top_p=0.1).choose(torch.tensor([[1.0, 3.0, 2.0]]), []) == 1


def test_draws_have_the_distribution():
    counts = Counter(draw(4000, seed=0, temperature=1))
    for token, wanted in enumerate((0.4, 0.3, 0.2, 0.06, 0.04)):
        assert counts[token] / 4000 == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (dict(top_k=2), {0, 1}),
        (dict(top_k=99), {0, 1, 2, 3, 4}),
        (dict(top_p=0.65), {0, 1}),
        (dict(top_p=0.75), {0, 1, 2}),
        (dict(top_p=0.01), {0}),
        (dict(min_p=0.45), {0, 1, 2}),
        (dict(min_p=1.0), {0}),
        (dict(top_k=3, top_p=0.5), {0, 1}),
    ],
)
def test_filters_leave_only_what_they_allow(settings, allowed):
    probabilities = sampler(temperature=1, **settings).probabilities(LOGITS, [])
    assert set(probabilities[0].nonzero().flatten().tolist()) == allowed
    assert probabilities.sum() == pytest.approx(1)
    kept = LOGITS.exp()[0, sorted(allowed)]
    assert torch.allclose(probabilities[0, sorted(allowed)], kept / kept.sum(), atol=1e-6)


def test_temperature_sharpens_and_flattens():
    cold, warm = (sampler(temperature=t).probabilities(LOGITS, [])[0, 0] for t in (0.5, 2.0))
    assert cold == pytest.approx(0.16 / (0.16 + 0.09 + 0.04 + 0.0036 + 0.0016), abs=1e-5)
    assert cold > 0.4 > warm


def test_repetition_is_punished_for_all_that_came_before():
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    assert sampler(temperature=0, repetition_penalty=1.5).choose(logits, [2, 0]) == 1
    assert sampler(temperature=0, repetition_penalty=1.5).choose(logits, [1]) == 0
    probabilities = sampler(temperature=1, repetition_penalty=2.0).probabilities(logits, [0, 2])
    assert torch.allclose(probabilities, torch.softmax(torch.tensor([[1.0, 1.5, -2.0]]), -1))


def test_bf16_logits_are_taken_in_fp32():
    probabilities = sampler(temperature=0.9).probabilities(LOGITS.to(torch.bfloat16), [])
    assert probabilities.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_tokens=0), "max tokens 0 is too small: at least 1"),
        (dict(temperature=-0.1), "temperature -0.1 is too small: at least 0"),
        (dict(temperature=float("nan")), "temperature nan is too small"),
        (dict(top_k=-1), "top k -1 is too small"),
        (dict(top_p=0.0), r"top p 0.0 is outside \(0, 1\]"),
        (dict(top_p=1.1), r"top p 1.1 is outside"),
        (dict(min_p=-0.1), r"min p -0.1 is outside \[0, 1\]"),
        (dict(min_p=1.5), r"min p 1.5 is outside"),
        (dict(repetition_penalty=0.0), "repetition penalty 0.0 must be above 0; 1 switches it off"),
        (dict(stop=("ok", "")), "a stop string is empty: it would end every reply at once"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GenerationConfig(**settings)
