"""The benchmark of Edge0 mode measures what it says, on a store of a published model's architecture made small."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine import EngineConfig, Mode
from engine.bench.edge0 import ARMS, heads_cost, run_edge0, speed_up
from engine.bench.synthetic import SHAPES, write_synthetic
from engine.forecast.law import RoutingLaw
from engine.store.layout import read_info
from tests.streaming import open_engine

SMALL = dict(num_hidden_layers=4, hidden_size=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
             shared_expert_intermediate_size=64, num_attention_heads=4, head_dim=32, linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, vocab_size=640)  # fmt: skip


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    shape = SHAPES["qwen-35b"]
    small = replace(shape, arguments={**shape.arguments, **SMALL})
    return write_synthetic(small, tmp_path_factory.mktemp("synthetic") / "store", "int4")


def test_a_synthetic_store_is_a_store(synthetic):
    info = read_info(synthetic)
    assert (info.resident_format, info.expert_format, len(info.layers)) == ("int4", "int4", 4)
    with open_engine(synthetic, 6, mode=Mode.EDGE0) as engine:
        logits = engine.force([1, 2, 3], list(range(4, 20)))
        assert logits.isfinite().all() and logits.std() > 0.1
        assert engine.modes()["on-demand"] is None and engine.modes()["edge0"] is None


def test_every_arm_is_measured_at_every_place(synthetic):
    result = run_edge0("small", synthetic, "50%", repeats=2, tokens=6, warm_up=2, ratios=(1.0,), resident=True)
    places = {(arm["place"], arm["name"]) for arm in result["arms"]}
    assert places == {(place, name) for place in ("disk", "link, ratio 1") for name in ARMS}
    for arm in result["arms"]:
        assert len(arm["seconds"]) == len(arm["closeness"]) == 2
        assert arm["dropped"] == 0
        assert (arm["agreement"] is not None) == (arm["name"] == "Edge0")
    json.dumps(result, allow_nan=False)
    assert result["heads_seconds_per_token"] > 0


def test_without_room_for_all_experts_computing_is_a_tokens_time_less_its_stalls(synthetic):
    result = run_edge0("small", synthetic, "50%", repeats=1, tokens=6, warm_up=2, ratios=(1.0,), resident=False)
    assert {arm["place"] for arm in result["arms"]} == {"disk"}
    for arm in result["arms"]:
        assert result["compute_seconds_per_token"][arm["name"]][0] <= arm["seconds"][0]


def test_heads_cost_counts_all_heads(synthetic):
    assert heads_cost(synthetic, RoutingLaw("softmax", 2, normalise=True), rounds=3) > 0


def test_a_speed_up_is_of_the_same_repeat():
    assert speed_up([2.0, 6.0], [1.0, 2.0]) == [2.0, 3.0]


def test_an_emulated_link_gives_the_same_tokens(synthetic):
    reply = list(range(4, 16))
    with open_engine(synthetic, 8, device="cpu") as disk:
        wanted = disk.force([1, 2, 3], reply)
    with open_engine(synthetic, 8, device="cpu", emulated_link="40MB") as linked:
        assert (linked.force([1, 2, 3], reply) == wanted).all()
        assert linked.stats().link == "emulated"
        assert linked.stats().stall_s > 0


@pytest.mark.parametrize(("settings", "message"), [
    (dict(emulated_link="0B", device="cpu"), "never arrive"),
    (dict(emulated_link="1GB"), "on the CPU only"),
    (dict(emulated_link="fast", device="cpu"), "not a size"),
])  # fmt: skip
def test_a_link_that_makes_no_sense_is_refused(settings, message):
    from engine import ConfigError

    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)
