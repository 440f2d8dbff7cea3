"""The benchmarks of Specter mode measure what they say, on a small store with a tokenizer of words."""

from __future__ import annotations

import json

import pytest

from engine.bench.ablations import CHANGES, FIXED, ablation_rows, run_ablations
from engine.bench.fidelity import run_fidelity
from engine.bench.greedy import run_greedy
from engine.bench.measure import speed_up
from engine.bench.specter import ARMS, Arm, baseline, run_specter
from tests.bench.test_edge0_bench import synthetic as synthetic  # noqa: PLC0414 - a fixture
from tests.specter import drafted_copy


@pytest.fixture(autouse=True)
def short_settling(monkeypatch):
    """Over a link at the pace of a small store's few misses, replies that only teach would take minutes."""
    monkeypatch.setattr("engine.bench.specter._SETTLING_TOKENS", 2)


@pytest.fixture(scope="module")
def drafted(synthetic, tmp_path_factory):
    return drafted_copy(synthetic, tmp_path_factory.mktemp("drafted") / "store", 3, 2)


def test_every_arm_is_measured_at_every_point(drafted):
    result = run_specter("small", drafted, repeats=2, tokens=6, warm_up=2, memories=("90%",), ratios=(2.0,), bits=2)
    points = {(p["place"], p["name"]) for p in result["points"]}
    assert points == {(place, name) for place in ("disk", "link, ratio 2") for name in ARMS}
    assert all(len(p["seconds"]) == len(p["bytes_per_token"]) == 2 for p in result["points"])
    assert 0 < result["draft_bytes"] < result["expert_bytes"]
    json.dumps(result, allow_nan=False)


def test_every_ablation_changes_one_thing(drafted):
    result = run_ablations("small", drafted, 1, 6, 0, memory="90%", ratio=2.0, bits=(2, 3))
    assert [p["name"] for p in result["points"]] == ["Specter", *(f"depth {d}" for d in FIXED), "3-bit draft", *CHANGES]
    assert not any(any(p["parked"]) for p in result["points"])
    rows = ablation_rows([Arm(**point) for point in result["points"]])
    assert {row["of"] for row in rows if row["arm"] in CHANGES} == {"depth 8"}
    json.dumps(result, allow_nan=False)


def test_fidelity_is_told_by_kind_and_temperature(drafted):
    result = run_fidelity("small", drafted, tokens=8, bits=(3,), depth=3)
    assert len({(c["kind"], c["temperature"]) for c in result["cells"]}) == 5 * 3
    for cell in result["cells"]:
        assert 0 <= cell["same_sets"] <= cell["overlap"] <= 1 and 0 <= cell["recall"] <= 1
    json.dumps(result, allow_nan=False)


def test_a_speed_up_is_over_the_faster_baseline_of_the_same_point():
    points = [Arm("35%", "disk", "on demand", [4.0, 6.0]), Arm("35%", "disk", "gate look-ahead", [3.0, 5.0]),
              Arm("45%", "disk", "on demand", [0.1, 0.1]), Arm("35%", "disk", "Specter", [1.0, 2.0])]  # fmt: skip
    assert speed_up(baseline(points, points[-1]), points[-1].seconds) == [3.0, 2.5]


def test_greedy_replies_are_compared_and_partings_measured(checkpoint, own_store, tmp_path):
    """In float32 the tiny model's replies are equal, or part at near-ties; what a parting is told with is its margin."""
    source, store = checkpoint("qwen2_moe"), own_store("qwen2_moe")
    result = run_greedy("small", source, store, tmp_path, prompts=4, tokens=6, memory="100%", bits=4)
    assert set(result["activations"]) == {"as it is", "float32"}
    for cell in result["activations"].values():
        assert all(0 <= parting["margin"] < 1e-2 for parting in cell["partings"])
    json.dumps(result, allow_nan=False)
    assert not list(tmp_path.glob("store-*"))
