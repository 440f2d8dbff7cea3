"""One expert's MLP, computed straight from the slot its record lies in; small experts are copied together to save calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.formats import MatrixFormat
from engine.memory.arena import SlotArena
from engine.store.layout import RecordLayout

_SMALL_RECORD = 2**17  # bytes; copying and widening a larger one takes longer than the calls it saves
# Bytes of weights times tokens. Computed together, every token is run by every expert: beyond this, what most tokens were
# not routed to costs more than the calls, and the copies get large.
_SMALL_PRODUCT = 2**27


class _Projection:
    """One of an expert's two matrices, and its bias, over all slots: each tensor a view [slots, ...] of the arena."""

    def __init__(
        self, form: MatrixFormat, tensors: list[torch.Tensor], bias: torch.Tensor | None, device: torch.device
    ) -> None:
        self.tensors = tensors if bias is None else [*tensors, bias]
        self.matmul, self.batched = form.matmul(device), form.batched_matmul(device)
        self._weights = list(zip(*(t.unbind() for t in tensors), strict=True))  # by slot
        self._biases = None if bias is None else bias.unbind()

    def __call__(self, slots: list[int], x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x [sum of counts, K] -> [sum of counts, N]: counts[i] rows in turn by slots[i], a call each."""
        parts = [self.matmul(rows, *self._weights[slot]) for slot, rows in zip(slots, x.split(counts), strict=True)]
        if self._biases is not None:
            parts = [part + self._biases[slot].to(part.dtype) for slot, part in zip(slots, parts, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def together(self, copies: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """x [n, K] or [B, n, K] -> [B, n, N], by the B experts whose tensors were copied, in one call."""
        weights, *bias = copies
        out = self.batched(x, weights)
        return out + bias[0].to(out.dtype).unsqueeze(1) if bias else out


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
        self.activate = activate
        self.finish = finish or (lambda out: out)
        self._record_bytes, self._device = layout.record_bytes, arena.device
        views = {
            f.name: arena.buffer[:, f.offset : f.offset + f.nbytes].view(getattr(torch, f.dtype)).unflatten(1, f.shape)
            for f in layout.fields
        }
        self._first, self._second = (  # in the order of computation: gate_up or up, then down
            _Projection(form, [views[name + s] for s in form.tensors()], views.get(f"{name}_bias"), arena.device)
            for name, form in layout.formats.items()
        )

    def __call__(self, slots: list[int], x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x [sum of counts, H] -> [sum of counts, H] in x.dtype: counts[i] rows in turn by the expert in slots[i].

        The same numbers as one call for each expert; what lies between the matrices is done for all of them at once.
        """
        hidden = self.activate(self._first(slots, x, counts))
        return self.finish(self._second(slots, hidden, counts))

    def for_one_token(self, slots: list[int], x: torch.Tensor) -> torch.Tensor:
        """x [1, H] -> [len(slots), H], row i by the expert in slots[i]."""
        return self(slots, x.expand(len(slots), -1), [1] * len(slots))

    def computes_together(self, experts: int, tokens: int) -> bool:
        """Whether to `copy` so many experts and compute them `together` rather than each by itself from its slot."""
        size = self._record_bytes
        small = size <= _SMALL_RECORD and 0 < size * experts * tokens <= _SMALL_PRODUCT
        return small and self._first.batched is not None and self._second.batched is not None

    def copy(self, slots: list[int]) -> list[torch.Tensor]:
        """Every tensor of the experts in `slots`, [len(slots), ...] each."""
        at = torch.tensor(slots, device=self._device)
        return [t.index_select(0, at) for t in (*self._first.tensors, *self._second.tensors)]

    def together(self, copies: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """x [n, H] -> [B, n, H] in x.dtype: every row by each of the B experts copied.

        How a product over a batch is rounded may depend on the whole batch: give all of a layer's experts, in one order.
        """
        split = len(self._first.tensors)
        hidden = self._first.together(copies[:split], x)
        experts, n, width = hidden.shape
        hidden = self.activate(hidden.reshape(experts * n, width)).view(experts, n, -1)
        out = self._second.together(copies[split:], hidden)
        return self.finish(out.reshape(experts * n, -1)).view(experts, n, -1)
