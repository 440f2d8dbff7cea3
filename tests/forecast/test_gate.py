"""Gate look-ahead asks for what the next layer's own router says about this layer's input, and never changes a routing."""

from __future__ import annotations

import pytest
import torch

from engine.forecast.gate import DemandForecast, GateLookahead
from engine.model.router import install, routed_ids
from engine.model.skeleton import find_experts, find_router
from tests.streaming import PROMPT, reference

IDS = torch.tensor([PROMPT])


class Listener:
    """Stands for a tier: writes down what it is asked for."""

    def __init__(self, experts: int) -> None:
        self.experts, self.clock = experts, 10
        self.begun: list[list[int]] = []
        self.foreseen: list[tuple[list[int], int]] = []

    def begin(self, keys: list[int]) -> None:
        self.begun.append(keys)

    def prefetch(self, keys: list[int], deadline: int) -> None:
        self.foreseen.append((keys, deadline))


@pytest.fixture(params=["qwen2_moe", "gpt_oss", "ernie4_5_moe", "deepseek_v3"])
def watched(request, checkpoint):
    """A model, its routers in order, a listener, and what each router was given."""
    model = reference(checkpoint(request.param))
    paths = list(find_experts(model))
    routers = [model.get_submodule(find_router(model, path)) for path in paths]
    listener = Listener(model.get_submodule(paths[0]).num_experts)
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recorded(GateLookahead):
        def on_routed(self, layer, moe_input, ids):
            inputs.append((moe_input, ids))
            super().on_routed(layer, moe_input, ids)

    forecast = Recorded(listener)
    forecast.seams = install(model, [find_router(model, path) for path in paths], forecast)
    return model, routers, listener, inputs


def keys_of(layer: int, experts: int, ids: torch.Tensor) -> list[int]:
    return [layer * experts + expert for expert in ids.unique().tolist()]


@torch.no_grad()
def test_it_asks_for_what_the_next_router_says(watched):
    model, routers, listener, inputs = watched
    model(input_ids=IDS)
    first = len(listener.foreseen)  # a block that owns its router's bias cannot be asked before it was called once
    assert first in (0, len(routers) - 1)
    listener.begun.clear(), listener.foreseen.clear(), inputs.clear()
    model(input_ids=IDS[:, :1])
    assert listener.begun == [keys_of(layer, listener.experts, ids) for layer, (_, ids) in enumerate(inputs)]
    assert len(listener.foreseen) == len(routers) - 1
    for layer, (keys, deadline) in enumerate(listener.foreseen):
        if first:  # routers that need nothing but the input
            wanted = routed_ids(routers[layer + 1](inputs[layer][0]))
            assert keys == keys_of(layer + 1, listener.experts, wanted)
        assert all(layer + 1 == key // listener.experts for key in keys)
        assert deadline == listener.clock + 2


def test_sentinels_are_nobody():
    forecast = DemandForecast(Listener(8))
    assert forecast.keys(2, torch.tensor([[3, 8], [3, 1]])) == [17, 19]


def test_a_router_that_needs_what_cannot_be_known_is_not_asked():
    listener = Listener(8)
    forecast = GateLookahead(listener)

    class Seam:
        inner = None  # asking it would fail
        extra: tuple | None = None

    forecast.seams = [Seam(), Seam()]
    for extra in (None, (torch.zeros(13),), ("token ids",)):
        forecast.seams[1].extra = extra
        forecast.on_routed(0, torch.zeros(1, 64), torch.tensor([[1, 2]]))
    assert listener.foreseen == []
    assert listener.begun == [[1, 2]] * 3
