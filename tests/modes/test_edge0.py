"""Edge0 mode computes what its definition says, forgets everything between requests, and leaves no trace when it is left."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from engine import ConfigError, Mode, StoreError
from engine.errors import ForecastError
from engine.forecast.heads import HeadFile, read_heads, write_heads
from engine.forecast.prerouter import load_prerouter
from engine.model.lora import Lora, LoraLinear, read_lora, write_lora
from engine.store.layout import read_info
from tests.edge0 import edge0_logits, fed_logits, merge, put_heads, put_lora
from tests.streaming import PROMPT, error_of, greedy, open_engine, reference, streamed, use_stored_experts

REPLY = [17, 201, 33, 8, 150, 91, 260, 14, 77, 301]
KINDS = ["qwen2_moe", "mixtral", "qwen3_5_moe", "deepseek_v3", "gpt_oss", "bailing_hybrid", "granitemoeshared"]


@pytest.fixture
def edge0(own_store):
    """edge0(kind, slots, ...) -> an engine in Edge0 mode with random heads, closed at the end."""
    opened = []

    def make(kind: str = "qwen2_moe", slots: int | None = None, experts: str = "bf16", store=None, **settings):
        store = own_store(kind, experts) if store is None else store
        heads = put_heads(store)
        engine = open_engine(store, slots, mode=Mode.EDGE0, **settings)
        opened.append(engine)
        return engine, heads, store

    yield make
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_the_student_path(kind, edge0, checkpoint):
    engine, heads, _ = edge0(kind)
    got = engine.force(PROMPT, REPLY)
    wanted = edge0_logits(reference(checkpoint(kind)), heads, PROMPT, REPLY)
    assert error_of(got, wanted) < 1e-3
    plain = edge0_logits(reference(checkpoint(kind)), HeadFile({}, {}), PROMPT, REPLY)
    assert error_of(got[:2], plain[:2]) < 1e-3  # the prompt, and the first decoded token, keep their own routing
    assert error_of(got[2:], plain[2:]) > 0.02
    assert engine.stats().dropped == 0


def test_with_a_lora_on_int4_experts(edge0, own_store, checkpoint):
    store = own_store("qwen2_moe", "int4")
    model = use_stored_experts(reference(checkpoint("qwen2_moe")), store)
    lora = put_lora(store, model)
    engine, heads, _ = edge0(store=store)
    got = engine.force(PROMPT, REPLY)
    merge(model, lora)
    assert error_of(got, edge0_logits(model, heads, PROMPT, REPLY)) < 0.05
    assert engine.stats().lora and engine.stats().routing == "prerouter"
    engine.configure(lora=False)
    assert not engine.stats().lora
    assert error_of(engine.force(PROMPT, REPLY), got) > 0.2


@pytest.mark.parametrize("kind", ["qwen2_moe", "bailing_hybrid"])
def test_tokens_do_not_depend_on_the_budget(kind, edge0):
    engine, _, store = edge0(kind)
    wanted = greedy(engine, tokens=16)
    info = read_info(store)
    for slots in (info.top_k, info.top_k + 2, len(info.layers) * info.experts // 2):
        engine.configure(expert_memory=slots * info.layout.record_bytes)
        engine.reset()
        assert greedy(engine, tokens=16) == wanted
        assert engine.stats().dropped == 0


def test_a_second_request_is_that_of_a_fresh_engine_bit_for_bit(edge0):
    other = [5, 80, 81, 200, 3, 44]
    engine, heads, store = edge0(slots=8)
    engine.force(other, REPLY[::-1])
    second = engine.force(PROMPT, REPLY)
    fresh, _, _ = edge0(store=store, slots=8)
    assert torch.equal(second, fresh.force(PROMPT, REPLY))
    assert torch.equal(second, fresh.force(PROMPT, REPLY))  # the prompt is not even read again


def test_off_is_the_exact_path(edge0, own_store):
    engine, _, store = edge0(slots=8)
    put_lora(store, streamed(engine))
    with open_engine(store, 8) as plain:
        wanted = plain.force(PROMPT, REPLY)
        names = [name for name, _ in streamed(plain).named_modules()]
    engine.configure(mode=Mode.EDGE0)  # entered again, with the LoRA
    assert not torch.equal(engine.force(PROMPT, REPLY), wanted)
    engine.configure(mode=Mode.ON_DEMAND)
    assert [name for name, _ in streamed(engine).named_modules()] == names
    assert torch.equal(engine.force(PROMPT, REPLY), wanted)
    assert engine.stats().routing == "router"
    assert engine.stats().forecast_agreement is None
    assert engine.stats().active_bytes_by_kind["adapters"] == 0


def test_heads_are_read_once_however_often_the_budget_changes(edge0):
    engine, _, store = edge0(slots=8)
    held = engine.forecast.prerouter
    engine.configure(expert_memory="50%")
    assert engine.forecast.prerouter is held
    put_heads(store, seed=5)
    engine.configure(expert_memory="75%")
    assert engine.forecast.prerouter is not held  # others were put there meanwhile


def test_reads_start_a_token_ahead(edge0):
    engine, _, store = edge0(slots=18)  # enough for what two tokens run
    greedy(engine, tokens=16)
    stats = engine.stats()
    asked = stats.hits + stats.late + stats.misses
    assert asked and stats.forecast_agreement is not None
    engine.settle()
    info = read_info(store)
    engine.restart_peak()
    assert stats.active_bytes_by_kind["adapters"] > 0
    assert engine.plan.adapter_bytes > 0
    assert info.top_k * len(info.layers) <= 18


def test_a_lost_forecast_is_an_error(edge0):
    engine, _, _ = edge0()
    engine.force(PROMPT, REPLY)
    forecast = engine._modes.forecast
    forecast.on_forward(True)
    forecast._ready.pop(1)
    with pytest.raises(ForecastError, match="layer 1 has no forecast"):
        forecast.routing(1)


def test_a_model_without_heads_says_how_to_get_them(own_store):
    store = own_store()
    with pytest.raises(ConfigError, match="python -m engine train"):
        open_engine(store, mode=Mode.EDGE0)
    with open_engine(store) as engine:
        modes = engine.modes()
        assert modes["on-demand"] is None and "train" in modes["edge0"]
        before = engine.force(PROMPT, REPLY)
        with pytest.raises(ConfigError, match="no prerouter heads"):
            engine.configure(mode=Mode.EDGE0)
        assert torch.equal(engine.force(PROMPT, REPLY), before)


@pytest.mark.parametrize("kind", ["phimoe"])
def test_an_architecture_that_routes_otherwise_is_refused(kind, own_store):
    store = own_store(kind)
    put_heads(store)
    with pytest.raises(ConfigError, match="routes neither by softmax"):
        open_engine(store, mode=Mode.EDGE0)


def test_adapters_of_another_model_are_refused(own_store):
    store = own_store()
    put_heads(store, model_sha256="0" * 64, model="another")
    with pytest.raises(StoreError, match="trained for another model"):
        open_engine(store, mode=Mode.EDGE0)
    put_heads(store, owners=[0, 7])
    with pytest.raises(StoreError, match="layer 7 has no MoE layer after it"):
        open_engine(store, mode=Mode.EDGE0)
    put_heads(store, model_sha256=read_info(store).source_sha256)
    with open_engine(store, mode=Mode.EDGE0) as engine:
        lora = put_lora(store, streamed(engine))
        first = next(iter(lora.pairs))
        lost = tuple(half.clone() for half in lora.pairs[first])
        wrong = Lora({**lora.pairs, "model.layers.9.self_attn.q_proj": lost}, 2.0, {})
        write_lora(store / "lora_test.safetensors", wrong)
        before = engine.force(PROMPT, REPLY)
        with pytest.raises(StoreError, match="layers.9"):
            engine.configure(mode=Mode.EDGE0, expert_memory="50%")
        assert torch.equal(engine.force(PROMPT, REPLY), before)


def test_published_heads_of_qwen3_5_route_only_layers_that_have_a_head(own_store):
    store = own_store("qwen3_5_moe")
    file = put_heads(store)
    info, device = read_info(store), torch.device("cpu")
    assert load_prerouter(store, info, device).consumers == {1, 2}
    write_heads(store / "prerouter_test.safetensors", HeadFile(file.tensors, {"K": "4"}))
    prerouter = load_prerouter(store, info, device)
    assert prerouter.consumers == {1} and set(prerouter.heads) == {0}


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prompt", "one token"])
@pytest.mark.parametrize("slots", [None, 6])
@pytest.mark.parametrize("chunk", [None, len(PROMPT) - 1])
def test_published_heads_of_bailing_are_fed_by_the_end_of_the_prompt(prompt, slots, chunk, own_store, checkpoint):
    store = own_store("bailing_hybrid")
    heads = HeadFile(put_heads(store).tensors, {"K": "3"})
    write_heads(store / "prerouter_test.safetensors", heads)
    with open_engine(store, slots, mode=Mode.EDGE0) as engine:
        engine._conversation.chunk = chunk or engine._conversation.chunk
        engine.force(PROMPT[::-1], REPLY)
        got = engine.force(prompt, REPLY)
        assert torch.equal(engine.force(prompt, REPLY), got)  # what the prompt's end forecast is not known any more
        assert engine.stats().dropped == 0
    assert error_of(got, fed_logits(reference(checkpoint("bailing_hybrid")), heads, prompt, REPLY)) < 1e-3
    plain = edge0_logits(reference(checkpoint("bailing_hybrid")), HeadFile({}, {}), prompt, REPLY)
    assert error_of(got[:1], plain[:1]) < 1e-3  # the prompt keeps its own routing
    assert error_of(got[1:2], plain[1:2]) > 0.02  # the first decoded token does not


def test_published_names_of_a_lora_find_their_modules(own_store):
    store = own_store("bailing_hybrid")
    put_heads(store)
    with open_engine(store) as engine:
        model = streamed(engine)
        for published, module in (
            ("model.layers.0.attention.q_proj", "model.layers.0.self_attn.q_proj"),
            ("base_model.model.model.layers.2.self_attn.dense", "model.layers.2.self_attn.o_proj"),
            ("language_model.model.layers.0.attention.f_proj", "model.layers.0.self_attn.forget_gate.f_proj"),
        ):
            linear = model.get_submodule(module)
            tensors = {f"{published}.lora_A": torch.randn(2, linear.in_features),
                       f"{published}.lora_B": torch.randn(linear.out_features, 2)}  # fmt: skip
            nested = {"__metadata__": json.dumps({"r": "2", "alpha": "6", "K": "3"})}
            save_file(tensors, store / "lora_test.safetensors", metadata=nested)
            before = engine.force(PROMPT, REPLY)
            engine.configure(mode=Mode.EDGE0)
            assert isinstance(model.get_submodule(module), LoraLinear)
            assert read_lora(store / "lora_test.safetensors").scale == 3
            assert not torch.equal(engine.force(PROMPT, REPLY)[:2], before[:2])  # the prompt has it too
            engine.configure(mode=Mode.ON_DEMAND)
            assert model.get_submodule(module) is linear


@pytest.mark.parametrize(("keys", "message"), [
    (["a.lora_C"], "a.lora_C is no part"),
    (["a.lora_A"], "a has no lora_B"),
    ([], "holds no LoRA"),
])  # fmt: skip
def test_a_file_that_is_no_lora_is_named(keys, message, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file({key: torch.zeros(2, 2) for key in keys}, path)
    with pytest.raises(StoreError, match=message):
        read_lora(path)


def test_peft_layout_and_its_configuration_are_read(tmp_path):
    path = tmp_path / "lora.safetensors"
    half = {f"base_model.model.model.layers.0.q.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}
    save_file(half, path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8}))
    lora = read_lora(path)
    assert list(lora.pairs) == ["model.layers.0.q"] and lora.scale == 2


@pytest.mark.parametrize("missing", ["fc1", "fc2"])
def test_a_head_that_is_not_whole_is_named(missing, tmp_path):
    parts = {"fc1": torch.zeros(4, 12), "fc2": torch.zeros(2, 4), "linear_init": torch.zeros(2, 12)}
    save_file({f"layers.3.{k}.weight": t for k, t in parts.items() if k != missing}, tmp_path / "p.safetensors")
    with pytest.raises(StoreError, match=f"layer 3 lacks {missing}"):
        read_heads(tmp_path / "p.safetensors")
    save_file({"layers.x.fc1.weight": parts["fc1"]}, tmp_path / "p.safetensors")
    with pytest.raises(StoreError, match="layers.x.fc1.weight"):
        read_heads(tmp_path / "p.safetensors")
    kept = {f"layers.3.mlp.prerouter.{k}.weight": t for k, t in parts.items() if k != "linear_init"}
    save_file(kept, tmp_path / "p.safetensors")
    assert read_heads(tmp_path / "p.safetensors").tensors[3]["linear_init"].shape == (2, 12)
