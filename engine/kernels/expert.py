"""One expert's MLP, computed straight from the slot its record lies in: no copy, no reassembly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.memory.arena import SlotArena
from engine.store.layout import RecordLayout


class ExpertKernel:
    """The MLP of experts whose records have `layout` and lie in `arena`.

    activate: what the model does between the projections, [n, 2I or I] -> [n, I]. finish: what it does after the second
    one, [n, H] -> [n, H], or None.
    """

    def __init__(
        self,
        layout: RecordLayout,
        arena: SlotArena,
        activate: Callable[[torch.Tensor], torch.Tensor],
        finish: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.activate, self.finish = activate, finish
        first, second = layout.formats  # in the order of computation: gate_up or up, then down
        self._first = layout.formats[first].matmul(arena.device)
        self._second = layout.formats[second].matmul(arena.device)
        self._slots = []
        for slot in range(arena.slots):
            views = layout.views(arena.record(slot))
            weights = [tuple(views[name + s] for s in layout.formats[name].tensors()) for name in (first, second)]
            self._slots.append((*weights, views.get(f"{first}_bias"), views.get(f"{second}_bias")))

    def __call__(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """x [n, H] -> [n, H] in x.dtype, by the expert whose record is in `slot`."""
        first, second, first_bias, second_bias = self._slots[slot]
        hidden = self._first(x, *first)
        if first_bias is not None:
            hidden = hidden + first_bias.to(hidden.dtype)
        out = self._second(self.activate(hidden), *second)
        if second_bias is not None:
            out = out + second_bias.to(out.dtype)
        return out if self.finish is None else self.finish(out)

    def for_one_token(self, slots: list[int], x: torch.Tensor) -> torch.Tensor:
        """x [1, H] -> [len(slots), H], row i by the expert in slots[i]: the same numbers as one call for each.

        What lies between the matrices is done for all of them at once; for small experts the calls are the cost.
        """
        weights = [self._slots[slot] for slot in slots]
        hidden = torch.cat([self._first(x, *w[0]) for w in weights])
        if weights[0][2] is not None:
            hidden = hidden + torch.stack([w[2] for w in weights]).to(hidden.dtype)
        rows = self.activate(hidden).split(1)
        out = torch.cat([self._second(row, *w[1]) for row, w in zip(rows, weights, strict=True)])
        if weights[0][3] is not None:
            out = out + torch.stack([w[3] for w in weights]).to(out.dtype)
        return out if self.finish is None else self.finish(out)
