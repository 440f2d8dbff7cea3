"""The router seam watches a router from outside, and is there only while somebody watches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.model.skeleton import parent_of

Watcher = Callable[[int, torch.Tensor, torch.Tensor], None]  # (layer, MoE input, expert ids [n, k])


class RouterSeam(nn.Module):
    """Stands where a router stood, calls it, and tells `watch` the input and the chosen ids."""

    def __init__(self, inner: nn.Module, layer: int, watch: Watcher) -> None:
        super().__init__()
        self.inner, self.layer, self.watch = inner, layer, watch
        # Further arguments of the router's last call: some blocks own the router's bias. None before the first call, and
        # where they are given by name, such as what a layer hands on to the next one's router.
        self.extra: tuple | None = None

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        result = self.inner(hidden_states, *args, **kwargs)
        self.extra = None if kwargs else args
        self.watch(self.layer, hidden_states, routed_ids(result))
        return result

    def __getattr__(self, name: str):
        """Blocks may read a router's own attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def routed_ids(result: tuple) -> torch.Tensor:
    """The expert ids [n, k] in what a router returns: its one tensor of integers, wherever that stands."""
    return next(part for part in result if isinstance(part, torch.Tensor) and not part.is_floating_point())


def install(model: nn.Module, routers: list[str], watch: Watcher) -> list[RouterSeam]:
    """Put a seam before each router, given by module path in layer order."""
    seams = []
    for layer, path in enumerate(routers):
        parent, name = parent_of(model, path)
        seam = RouterSeam(getattr(parent, name), layer, watch)
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
