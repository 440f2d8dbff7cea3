"""Two ways take turns until one is known to be faster; it goes on, and is compared again when some time has passed."""

from __future__ import annotations

import pytest

from engine import GenerationConfig
from engine.decode.trial import Trial
from tests.streaming import PROMPT, REPETITION, greedy, open_engine


def follow(trial: Trial, seconds: dict[bool, float], steps: int, tokens: int = 1) -> list[bool]:
    ways = []
    for _ in range(steps):
        ways.append(trial.now)
        trial.add(seconds[trial.now] * tokens, tokens)
    return ways


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_faster_way_goes_on(faster, tokens):
    ways = follow(Trial(), {faster: 1.0, not faster: 1.1}, 200, tokens)
    assert {True, False} == set(ways[:60])
    assert set(ways[60:80]) == {faster}


def test_trials_become_seldom():
    ways = follow(Trial(), {True: 1.0, False: 2.0}, 20000)
    assert ways.count(False) < 0.02 * len(ways)


def test_it_follows_when_conditions_change():
    trial = Trial()
    follow(trial, {True: 1.0, False: 2.0}, 400)
    ways = follow(trial, {True: 2.0, False: 1.0}, 2000)
    assert ways[-500:].count(False) > 450


def test_one_odd_turn_decides_nothing():
    trial = Trial()
    for step in range(54):
        trial.add(9.0 if trial.now and step < 12 else 1.0 if trial.now else 2.0)
    assert trial.now


def test_the_first_step_of_a_turn_does_not_count():
    trial, before = Trial(), None
    for _ in range(54):
        trial.add(50.0 if trial.now and trial.now != before else 1.0 if trial.now else 2.0)
        before = trial.now
    assert trial.now


def test_by_itself_an_engine_looks_ahead_in_turns_and_says_the_same(store):
    with open_engine(store("qwen2_moe"), None) as engine:
        expected = greedy(engine, tokens=40)
    with open_engine(store("qwen2_moe"), 6, "auto") as engine:
        assert engine.config.prefetch == "auto"
        generation = GenerationConfig(max_tokens=40, temperature=0, repetition_penalty=REPETITION)
        said, ways = [], set()
        for chunk in engine.complete(PROMPT, generation):
            said += chunk.token_ids
            ways.add(engine.stats().prefetch)
        assert said == expected
        assert ways == {"gate", "none"}
