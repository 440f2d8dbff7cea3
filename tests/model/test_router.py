"""The router seam sees what the router decides, changes nothing, and leaves no trace when it is taken away."""

from __future__ import annotations

import pytest
import torch

from engine.model.router import RouterSeam, Routing, install, remove, routed_ids
from engine.model.skeleton import find_experts, find_router, top_k
from tests.streaming import PROMPT, reference
from tests.tiny_models import CONFIGS

IDS = torch.tensor([PROMPT])


class Watcher:
    """Writes down what it is told, and supplies `routings` by layer."""

    def __init__(self, seen: list, routings: dict[int, Routing] | None = None) -> None:
        self.seen, self.routings = seen, routings or {}

    def routing(self, layer: int) -> Routing | None:
        return self.routings.get(layer)

    def on_routed(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        self.seen.append((layer, moe_input, ids))


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_watches_and_changes_nothing(kind, checkpoint):
    model = reference(checkpoint(kind))
    paths = list(find_experts(model))
    routers, seen, given = [find_router(model, path) for path in paths], [], []
    assert None not in routers
    before, wanted = list(model.named_modules()), model(input_ids=IDS).logits
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda _, args: given.append(args[1])) for path in paths
    ]
    install(model, routers, Watcher(seen))
    assert torch.equal(model(input_ids=IDS).logits, wanted)
    assert [layer for layer, _, _ in seen] == list(range(len(paths)))
    for (_, moe_input, ids), asked in zip(seen, given, strict=True):
        assert moe_input.shape[-1] == 64
        assert torch.equal(ids.reshape(asked.shape), asked)  # what the experts were then asked for
        assert ids.shape[-1] == top_k(model, paths[0])
    remove(model, routers)
    for hook in hooks:
        hook.remove()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before]
    assert all(module is old for (_, module), (_, old) in zip(model.named_modules(), before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_supplied_routing_is_what_the_experts_get(kind, checkpoint):
    model = reference(checkpoint(kind))
    paths = list(find_experts(model))
    watcher, asked = Watcher([]), []
    install(model, [find_router(model, path) for path in paths], watcher)
    own = model(input_ids=IDS).logits
    model.get_submodule(paths[-1]).register_forward_pre_hook(lambda _, args: asked.append(args[1:]))
    ids = watcher.seen[-1][2].flip(0)  # every token gets another one's experts
    weights = torch.rand(ids.shape) + 0.5
    experts = model.get_submodule(paths[-1]).num_experts
    watcher.routings[len(paths) - 1] = Routing(torch.rand(*ids.shape[:-1], experts), ids, weights)
    other = model(input_ids=IDS).logits
    assert torch.equal(asked[0][0].reshape(ids.shape), ids)
    torch.testing.assert_close(asked[0][1].reshape(ids.shape), weights)
    assert not torch.equal(own, other)


def test_a_router_keeps_its_attributes_behind_the_seam():
    inner = torch.nn.Linear(4, 8)
    seam = RouterSeam(inner, 0, Watcher([]))
    assert seam.weight is inner.weight
    assert seam.out_features == 8
    with pytest.raises(AttributeError):
        _ = seam.nonsense


def test_ids_are_found_wherever_a_router_puts_them():
    ids, weights = torch.tensor([[1, 2]]), torch.rand(1, 2)
    assert routed_ids((torch.rand(1, 8), weights, ids)) is ids
    assert routed_ids((ids, weights, torch.rand(1, 8))) is ids
    assert routed_ids((None, weights, ids, None)) is ids
