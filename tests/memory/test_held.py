"""What is held is counted: the ledger's kinds and peak, the arena's bytes, the cache's, and the process's own size."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from engine import PlanError, prepare
from engine.memory.arena import SlotArena
from engine.memory.kv import cache_bytes, kv_bytes
from engine.memory.ledger import Ledger
from engine.model.skeleton import build_skeleton, cache_argument, load_config
from tests.streaming import PROMPT, greedy, open_engine, streamed
from tests.tiny_models import CONFIGS, save_random

MIB = 2**20


def test_the_peak_is_the_most_held_at_one_time():
    ledger = Ledger()
    ledger.set("experts", 100)
    ledger.set("kv", 50)
    ledger.set("experts", 20)
    ledger.set("kv", 70)
    assert (ledger.active, ledger.peak) == (90, 150)
    assert ledger.by_kind()["kv"] == 70
    ledger.reset_peak()
    assert ledger.peak == 90


def test_slots_are_page_aligned_apart_and_writable():
    arena = SlotArena(3, 2 * 4096, torch.device("cpu"))
    assert arena.bytes == 3 * 2 * 4096
    for slot in range(3):
        assert arena.record(slot).data_ptr() % 4096 == 0
        arena.memory(slot)[:] = bytes([slot + 1]) * 2 * 4096
    assert [int(arena.record(slot).float().mean()) for slot in range(3)] == [1, 2, 3]
    arena.close()


def test_more_slots_than_there_is_address_space():
    with pytest.raises(PlanError, match="cannot allocate .* bytes of expert slots on cpu: lower the expert memory"):
        SlotArena(2**30, 2**30, torch.device("cpu"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_kv_bytes_are_those_of_the_real_cache(kind, checkpoint):
    config = load_config(checkpoint(kind))
    per_token, fixed = kv_bytes(build_skeleton(config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for length in (1, 7, 40):
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(input_ids=torch.tensor([PROMPT * 4])[:, :length], use_cache=True, **{cache_argument(model): cache})
        planned = fixed + length * per_token
        held = cache_bytes(cache)
        assert held <= planned
        if kind != "gpt_oss" or length < 16:  # beyond its window a sliding layer holds less than planned
            assert held == planned


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "qwen3_5_moe", "bailing_hybrid"])
def test_the_peak_stays_within_the_plan(kind, store):
    with open_engine(store(kind), 5, "gate", context=300) as engine:
        greedy(engine, [*PROMPT * 20][:250], tokens=50)
        greedy(engine, [*PROMPT * 10], tokens=50)
        stats, plan = engine.stats(), engine.plan
        assert stats.peak_active_bytes <= plan.total_bytes
        held = stats.active_bytes_by_kind
        assert held["experts"] == 5 * plan.record_bytes <= plan.expert_budget_bytes == stats.expert_budget_bytes
        assert 0 < held["kv"] <= plan.kv_bytes
        assert held["scratch"] == 0
        assert 0 < held["resident"] <= 1.1 * plan.resident_bytes
        engine.reset()
        assert engine.stats().active_bytes_by_kind["kv"] == 0


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.fixture(scope="module")
def bulky(tmp_path_factory):
    """A store with 192 MiB of experts and hardly anything else."""
    shape = dict(CONFIGS["qwen3_moe"], vocab_size=320, hidden_size=256, moe_intermediate_size=512, num_experts=64,
                 num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    directory = tmp_path_factory.mktemp("bulky")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**shape), dtype=torch.bfloat16)
    return prepare(save_random(model, directory / "checkpoint"), directory / "store", "bf16")


def test_shrinking_gives_the_memory_back_and_growing_takes_it(bulky):
    with open_engine(bulky, 2, "none") as engine:
        greedy(engine)
        small = rss()
        engine.configure(expert_memory="100%")
        engine.settle()
        large = rss()
        total = engine.plan.expert_bytes_total
        assert total == 192 * MIB
        assert engine.stats().active_bytes_by_kind["experts"] == total
        assert large - small > total - 32 * MIB
        wanted = greedy(engine)
        engine.configure(expert_memory="10%")
        shrunk = rss()
        assert large - shrunk > 0.9 * total - 32 * MIB
        assert engine.stats().active_bytes_by_kind["experts"] <= 0.1 * total
        assert greedy(engine) == wanted
    assert rss() - small < 32 * MIB


def test_reading_around_the_page_cache_holds_no_more_than_the_slots(bulky):
    with open_engine(bulky, 8, "none") as engine:
        greedy(engine, tokens=2)
        before = rss()
        greedy(engine, PROMPT * 4, tokens=20)
        assert engine.stats().bytes_read > 50 * MIB
        assert rss() - before < 32 * MIB
        assert streamed(engine) is not None
