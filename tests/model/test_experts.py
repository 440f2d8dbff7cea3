"""The drop-in computes what transformers' experts module computes, for any routing, whatever is cached and in any order."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch

from engine import Engine
from engine.store.layout import read_info
from tests.streaming import PROMPT, error_of, greedy, open_engine, reference, streamed, use_stored_experts
from tests.tiny_models import CONFIGS

# The packed kernels take activations rounded to bf16: 2^-9 each, twice, on a sum of random signs.
BOUND = {"bf16": 1e-6, "int8": 0.01, "int4": 0.01}
LAYER = -1  # of the MoE layers


def drop_in(engine: Engine):
    return streamed(engine).get_submodule(engine.info.layers[LAYER])


def routing(tokens: int, k: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    return torch.randn(tokens, 64, generator=generator), ids, torch.rand(tokens, k, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("experts", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_computes_what_the_record_stands_for(kind, experts, checkpoint, store):
    directory = store(kind, experts)
    info = read_info(directory)
    original = use_stored_experts(reference(checkpoint(kind)), directory).get_submodule(info.layers[LAYER])
    with open_engine(directory, info.top_k) as engine:
        for tokens in (1, 2, 5, 40):
            case = routing(tokens, info.top_k, info.experts, seed=tokens)
            assert error_of(drop_in(engine)(*case), original(*case)) < BOUND[experts]


@torch.no_grad()
def test_the_result_does_not_depend_on_what_was_cached(store):
    directory, results = store("qwen2_moe"), []
    case, others = routing(6, 3, 8, seed=1), [routing(4, 3, 8, seed=s) for s in range(2, 6)]
    for slots in (3, 5, 9, None):
        with open_engine(directory, slots) as engine:
            for other in others:
                results.append(drop_in(engine)(*case))  # bit for bit, in every state of the tier
                drop_in(engine)(*other)
    assert all(torch.equal(result, results[0]) for result in results)


class AnyOrder:
    """Leases everything in batches of random sizes, in random order."""

    def __init__(self, slot_of: dict[int, int], seed: int) -> None:
        self.slot_of, self.draw = slot_of, random.Random(seed)

    def lease(self, keys: list[int], meanwhile=None):
        assert meanwhile is None
        left = self.draw.sample(keys, len(keys))
        while left:
            size = self.draw.randint(1, len(left))
            yield [(key, self.slot_of[key]) for key in left[:size]]
            left = left[size:]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["bf16", "int8", "int4"])
def test_the_result_does_not_depend_on_the_order_of_arrival(experts, dtype, store):
    with open_engine(store("qwen2_moe", experts, dtype)) as engine:
        layer = drop_in(engine)
        keys = [layer.layer * layer.experts + i for i in range(layer.experts)]
        tier = layer.tier
        slot_of = {key: slot for batch in tier.lease(keys) for key, slot in batch}
        for tokens in (1, 2, 5, 17, 33, 80):
            x, ids, weights = routing(tokens, 3, 8, seed=tokens)
            case = x.to(dtype), ids, weights.to(dtype)
            layer.tier = tier
            expected = layer(*case)
            for seed in range(8):
                layer.tier = AnyOrder(slot_of, seed)
                assert torch.equal(layer(*case), expected)
        assert layer.dropped == 0


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("experts", ["bf16", "int4"])
def test_no_expert_and_the_same_expert_twice(experts, tokens, store, checkpoint):
    directory = store("qwen2_moe", experts)
    model = use_stored_experts(reference(checkpoint("qwen2_moe")), directory)
    original = model.get_submodule(read_info(directory).layers[LAYER])
    x, ids, weights = routing(tokens, 3, 8, seed=3)
    with open_engine(directory, 3) as engine:
        layer = drop_in(engine)
        ids[:, 1] = 8  # transformers' sentinel: no expert
        wanted = original(x, ids.clamp_max(7), weights.index_fill(1, torch.tensor([1]), 0))
        assert error_of(layer(x, ids, weights), wanted) < BOUND[experts]
        ids[:, 1] = ids[:, 0]
        assert error_of(layer(x, ids, weights), original(x, ids, weights)) < BOUND[experts]
        ids[:] = 8
        assert torch.equal(layer(x, ids, weights), torch.zeros_like(x))
        assert engine.stats().dropped == 0


def test_attached_to_nothing_it_holds_no_slot(store):
    with open_engine(store("qwen2_moe")) as engine:
        layer = drop_in(engine)
    assert layer.tier is None
    assert layer.kernel is None


class Residents:
    """The experts that would be resident if each layer's ids were asked for in turn: least recently used out first."""

    def __init__(self, slots: int) -> None:
        self.slots, self.held = slots, OrderedDict()
        self.asked = self.misses = 0

    def visit(self, keys: list[int]) -> None:
        self.asked += len(keys)
        self.misses += sum(key not in self.held for key in keys)
        for key in keys:
            self.held[key] = True
            self.held.move_to_end(key)
        while len(self.held) > self.slots:
            self.held.popitem(last=False)


@pytest.mark.parametrize("prefetch", ["none", "gate"])
@pytest.mark.parametrize("slots", [3, 7, 15, None])
def test_the_counters_add_up(slots, prefetch, store):
    with open_engine(store("qwen2_moe"), slots, prefetch) as engine:
        engine.settle()
        routed = Residents(engine.plan.slots)
        experts = engine.info.experts

        def count(module, inputs):
            routed.visit(sorted({module.layer * experts + i for i in inputs[1].flatten().tolist() if i < experts}))

        hooks = [streamed(engine).get_submodule(path).register_forward_pre_hook(count) for path in engine.info.layers]
        for prompt in (PROMPT, PROMPT, PROMPT[:5]):
            routed.asked = 0
            greedy(engine, prompt)
            stats = engine.stats()
            assert stats.hits + stats.late + stats.misses == routed.asked > 0
            assert stats.dropped == 0
            assert stats.hit_rate == stats.hits / routed.asked
            if slots is None:
                assert (stats.late, stats.misses, stats.bytes_read, stats.hidden_io) == (0, 0, 0, None)
            engine.settle()
        for hook in hooks:
            hook.remove()


def test_with_room_for_one_layers_experts_every_other_layer_is_missed(store):
    """With exactly k slots and k experts asked for, nothing of a layer can outlast the next one."""
    with open_engine(store("qwen2_moe"), 3, "none") as engine:
        tokens = greedy(engine, PROMPT[:1], tokens=6)
        stats = engine.stats()
        asked = 3 * len(engine.info.layers) * len(tokens)
        assert (stats.hits, stats.late, stats.misses) == (0, 0, asked)
        assert stats.bytes_read == asked * engine.info.layout.record_bytes
