"""The router seam stands before a router only while somebody watches it; it may be told a routing to return instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from engine.model.skeleton import parent_of


@dataclass(frozen=True)
class Routing:
    """Experts of n tokens: logits [n, E] of any float dtype, ids [n, k] int64, weights [n, k] float32."""

    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Forecaster(Protocol):
    """What a seam talks to. `layer` counts the MoE layers from 0."""

    def routing(self, layer: int) -> Routing | None:
        """The routing of `layer`'s present input; None leaves it to the router."""

    def on_routed(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        """`layer` is about to run the experts `ids` [n, k] on `moe_input`."""


class RouterSeam(nn.Module):
    """Stands where a router stood: returns what the forecaster supplies, else what the router says, and tells the
    forecaster."""

    def __init__(self, inner: nn.Module, layer: int, forecaster: Forecaster) -> None:
        super().__init__()
        self.inner, self.layer, self.forecaster = inner, layer, forecaster
        # Further arguments of the router's last call: some blocks own the router's bias. None before the first call, and
        # where they are given by name, such as what a layer hands on to the next one's router.
        self.extra: tuple | None = None
        self._example: tuple | None = None  # the router's last result: which part is what, and of which dtype

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        supplied = self.forecaster.routing(self.layer)
        if supplied is None:
            result = self._example = self.inner(hidden_states, *args, **kwargs)
            self.extra = None if kwargs else args
        else:
            result = router_result(self._example, supplied)
        self.forecaster.on_routed(self.layer, hidden_states, routed_ids(result))
        return result

    def __getattr__(self, name: str):
        """Blocks may read a router's own attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class TraceSeam(RouterSeam):
    """Tells `watch` everything about a routing and changes nothing. watch(layer, MoE input [n, H], Routing of it)."""

    def __init__(self, inner: nn.Module, layer: int, watch: Callable[[int, torch.Tensor, Routing], None]) -> None:
        nn.Module.__init__(self)
        self.inner, self.layer, self.watch = inner, layer, watch

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        result = self.inner(hidden_states, *args, **kwargs)
        routing = as_routing(result)
        self.watch(self.layer, hidden_states.reshape(len(routing.ids), -1), routing)
        return result


def as_routing(result: tuple) -> Routing:
    """What a router returned, part by part."""
    ids = routed_ids(result)
    floats = [part for part in result if isinstance(part, torch.Tensor) and part.is_floating_point()]
    return Routing(
        next(p for p in floats if p.shape != ids.shape), ids, next(p for p in floats if p.shape == ids.shape)
    )


def router_result(example: tuple, routing: Routing) -> tuple:
    """`routing` in the shape and the dtypes in which a router returned `example`."""
    k = routed_ids(example).shape[-1]
    return tuple(
        part if not isinstance(part, torch.Tensor)
        else routing.ids if not part.is_floating_point()
        else routing.weights.to(part.dtype) if part.shape[-1] == k
        else routing.logits.to(part.dtype)
        for part in example
    )  # fmt: skip


def routed_ids(result: tuple) -> torch.Tensor:
    """The expert ids [n, k] in what a router returns: its one tensor of integers, wherever that stands."""
    return next(part for part in result if isinstance(part, torch.Tensor) and not part.is_floating_point())


def install(model: nn.Module, routers: list[str], listener, seam_class: type = RouterSeam) -> list[RouterSeam]:
    """Put a seam that talks to `listener` before each router, given by module path in layer order."""
    seams = []
    for layer, path in enumerate(routers):
        parent, name = parent_of(model, path)
        seam = seam_class(getattr(parent, name), layer, listener)
        setattr(parent, name, seam)
        seams.append(seam)
    return seams


def remove(model: nn.Module, routers: list[str]) -> None:
    """Put the routers back; the model is then as if no seam had ever been there."""
    for path in routers:
        parent, name = parent_of(model, path)
        seam = getattr(parent, name)
        if isinstance(seam, RouterSeam):
            setattr(parent, name, seam.inner)
