"""An expert that is missing on a device may be computed from host memory: the same result, by what was measured to be cheaper."""

from __future__ import annotations

import pytest

from engine import ConfigError, EngineConfig, Mode
from engine.residency.misses import Costs, deal
from tests.specter import drafted_copy
from tests.streaming import PROMPT, greedy, open_engine

LINK = "200MB"


def engine_with(directory, misses: str, link: str = LINK, slots: int = 6, **settings):
    return open_engine(directory, slots, device="cpu", emulated_link=link, misses=misses, **settings)


def test_costs_follow_what_is_measured():
    asked = []

    def probe(tokens: int) -> float:
        asked.append(tokens)
        return 0.001 * tokens

    costs = Costs(probe)
    assert [costs.of(n) for n in (1, 2, 3, 4, 5, 1, 4)] == [0.001, 0.002, 0.004, 0.004, 0.008, 0.001, 0.004]
    assert asked == [1, 2, 4, 8]  # each once
    for _ in range(100):
        costs.learn([1, 3], 0.010)  # twice what was thought
    assert costs.of(1) == pytest.approx(0.002, rel=1e-3)
    assert costs.of(4) == pytest.approx(0.008, rel=1e-3)
    assert costs.of(2) == 0.002  # of which nothing was learnt


@pytest.mark.parametrize(
    ("copy_s", "link_s", "here"),
    [
        (100.0, 0.0, [1, 2, 3, 4]),  # copies never end before the processor does
        (0.1, 0.0, []),
        (2.5, 0.0, [1, 2]),  # 1 and 1 here; then 2 more would end at 4, and the copy at 2.5; so would the last
        (0.1, 50.0, [1, 2, 3, 4]),  # the link is busy with others
    ],
)
def test_missing_experts_go_to_whoever_ends_them_sooner(copy_s, link_s, here):
    cost = {1: 1.0, 2: 1.0, 3: 2.0, 8: 6.0}
    counts = {1: 1, 2: 2, 3: 3, 4: 8}  # key -> tokens
    assert deal(counts, cost.__getitem__, copy_s, link_s) == here


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v2", "qwen3_5_moe"])
@pytest.mark.parametrize("prefetch", ["none", "gate"])
def test_the_tokens_are_the_same_wherever_experts_are_computed(kind, prefetch, store):
    directory = store(kind)
    with open_engine(directory, None) as engine:
        expected = greedy(engine)
    with engine_with(directory, "cpu", prefetch=prefetch) as engine:
        for _ in range(2):
            engine.reset()
            assert greedy(engine) == expected
            stats = engine.stats()
            assert 0 < stats.computed_on_host <= stats.misses
            assert stats.dropped == 0
            assert (engine.residency() > 0).sum() >= 6


def test_all_experts_asked_for_are_counted_once(store):
    asked = []
    for misses in ("copy", "cpu"):
        with engine_with(store("qwen3_moe"), misses) as engine:
            greedy(engine)
            stats = engine.stats()
            asked.append(stats.hits + stats.late + stats.misses)
            assert (stats.computed_on_host > 0) is (misses == "cpu")
    assert asked[0] == asked[1]


def test_the_slots_follow_what_is_used_although_nothing_waits_for_a_copy(store):
    with engine_with(store("qwen3_moe"), "cpu", "2GB") as engine:
        greedy(engine)
        before = engine.stats().bytes_read
        engine.settle()
        greedy(engine, PROMPT[::-1])
        engine.settle()
        assert engine.stats().bytes_read > 0 < before


@pytest.mark.parametrize(("seconds", "here"), [(0.0, True), (1e6, False)])
def test_what_is_cheaper_by_measurement_is_done(seconds, here, store, monkeypatch):
    monkeypatch.setattr(Costs, "of", lambda self, tokens: seconds)
    monkeypatch.setattr(Costs, "learn", lambda self, counts, taken: None)
    with engine_with(store("qwen3_moe"), "cpu", slots=4) as engine:
        for experts in engine._experts:
            experts.host._always = False  # as `auto` on a device that is not the processor
        greedy(engine, PROMPT[:2], 6)
        assert (engine.stats().computed_on_host > 0) is here


def test_specter_mode_computes_there_too(store, tmp_path):
    directory = drafted_copy(store("qwen3_moe"), tmp_path / "store", 4)
    with open_engine(directory, None) as engine:
        expected = greedy(engine)
    with engine_with(directory, "cpu") as engine:
        whole = engine.plan.record_bytes * 6
        engine.configure(mode=Mode.SPECTER, depth=3, expert_memory=whole + engine.info.expert_bytes_total)
        engine.configure(prefetch="none")  # what is drafted for is otherwise on its way already
        assert greedy(engine) == expected


def test_without_a_link_there_is_nothing_to_choose(store):
    for misses in ("copy", "cpu", "auto"):
        with open_engine(store("qwen3_moe"), 4, device="cpu", misses=misses) as engine:
            greedy(engine)
            assert engine.stats().computed_on_host == 0
    with pytest.raises(ConfigError, match="misses 'gpu' is unknown: choose from copy, cpu, auto"):
        EngineConfig(misses="gpu")
