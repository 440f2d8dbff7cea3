"""The plan's numbers are the sum of what will be held, and a plan that does not fit says what would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine import ConfigError, EngineConfig, PlanError, plan
from engine.memory import plan as planning
from engine.memory.plan import available_memory, make_plan, prefill_chunk, scratch_bytes
from engine.store.layout import read_info

GIB = 2**30
VOCABULARY = 320


@pytest.fixture(scope="module")
def info(store):
    return read_info(store("qwen2_moe"))


def made(info, available: int = 64 * GIB, **settings):
    return make_plan("tiny", info, EngineConfig("tiny", **settings), VOCABULARY, 0, available)


def test_the_total_is_the_sum(info):
    result = made(info, expert_memory="50%", context=1000)
    kinds = (result.resident_bytes, result.expert_budget_bytes, result.kv_bytes, result.scratch_bytes, result.adapter_bytes,
             result.draft_bytes)  # fmt: skip
    assert result.total_bytes == sum(kinds)
    assert result.resident_bytes == info.resident_bytes
    assert result.expert_bytes_total == 24 * info.layout.record_bytes
    assert result.kv_bytes == 1000 * info.kv_bytes_per_token
    assert (result.layers, result.experts, result.top_k) == (3, 8, 3)
    assert result.fits


@pytest.mark.parametrize(
    ("memory", "slots"), [("100%", 24), ("50%", 12), ("49.9%", 11), ("1GiB", 24), ("500%", 24), ("auto", 24), ("0", 0)]
)
def test_slots_are_what_fits_into_the_budget(info, memory, slots):
    result = made(info, expert_memory=memory)
    assert result.slots == slots
    assert result.slots * result.record_bytes <= result.expert_budget_bytes <= result.expert_bytes_total


def test_auto_takes_what_is_free_and_never_less_than_the_least(info):
    others = made(info).total_bytes - made(info).expert_budget_bytes
    margin = made(info).margin_bytes
    room = 7 * info.layout.record_bytes + 100
    assert made(info, available=others + margin + room).slots == 7
    tight = made(info, available=others + margin)
    assert tight.expert_budget_bytes == tight.min_expert_bytes
    assert not tight.fits


def test_below_the_minimum(info):
    with pytest.raises(PlanError) as caught:
        made(info, expert_memory=2 * info.layout.record_bytes).require_fit()
    least = 3 * info.layout.record_bytes
    assert "below the minimum for tiny: one layer's 3 experts need" in str(caught.value)
    assert f"({least} bytes); set it to at least that" in str(caught.value)
    assert made(info, expert_memory=least).require_fit().slots == 3


def test_the_way_out_of_a_plan_that_does_not_fit_fits(info):
    big = replace(info, layout=replace(info.layout, record_bytes=40 * 2**20))
    with pytest.raises(PlanError, match=r"lower the expert memory to (\d+)MiB") as caught:
        made(big, available=GIB, expert_memory="100%").require_fit()
    memory = str(caught.value).rpartition(" ")[2]
    made(big, available=GIB, expert_memory=memory).require_fit()


def test_a_context_that_does_not_fit_names_one_that_does(info):
    wide = replace(info, kv_bytes_per_token=2**20)
    with pytest.raises(PlanError, match=r"lower the context to (\d+) tokens and the expert memory to") as caught:
        made(wide, available=GIB, context=4096, expert_memory="100%").require_fit()
    context = int(str(caught.value).split("lower the context to ")[1].split()[0])
    assert context >= 256
    made(wide, available=GIB, context=context, expert_memory=info.top_k * info.layout.record_bytes).require_fit()


def test_no_way_out(info):
    with pytest.raises(PlanError, match="choose a smaller model, int4 resident weights, or a machine with more memory"):
        made(replace(info, resident_bytes=8 * GIB), available=GIB).require_fit()


def test_prefill_chunks_depend_on_the_model_alone(info):
    sizes = {prefill_chunk(replace(info, top_k=k, hidden=h)) for k in (1, 8, 64) for h in (64, 2048, 16384)}
    assert sizes <= {128, 256, 512, 1024}
    assert len(sizes) > 1
    assert scratch_bytes(info, 100, VOCABULARY) < scratch_bytes(info, 200, VOCABULARY)


def test_nothing_is_loaded_to_plan(own_store):
    directory = own_store()
    result = plan(EngineConfig(str(directory), "50%", context=512))
    assert result.slots == 12
    assert result.available_bytes == pytest.approx(available_memory(torch.device("cpu")), rel=0.5)
    with pytest.raises(ConfigError, match="expert memory 'lots' is not a size"):
        plan(EngineConfig(str(directory), "lots"))


def test_a_cgroup_limit_counts(tmp_path, monkeypatch):
    limit, used = tmp_path / "limit", tmp_path / "used"
    monkeypatch.setattr(planning, "_CGROUP_FILES", ((str(limit), str(used)),))
    free = available_memory(torch.device("cpu"))
    limit.write_text("100000000\n")
    used.write_text("30000000\n")
    assert available_memory(torch.device("cpu")) == 70000000
    limit.write_text("max\n")
    assert available_memory(torch.device("cpu")) == pytest.approx(free, rel=0.5)


def test_cuda_where_there_is_none(monkeypatch, info):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="device cuda: this machine has no CUDA device.*choose --device cpu"):
        made(info, device="cuda")
    assert made(info, device="auto").device == "cpu"
