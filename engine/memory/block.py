"""Many small tensors that come and go together lie in one mapping, so that dropping them gives all of it back at once.

Each by itself would lie in the heap, which keeps what it was given wherever something smaller was put behind it.
"""

from __future__ import annotations

import torch

from engine.memory.arena import SlotArena

_ALIGNMENT = 64  # bytes


def empty_together(layouts: list[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Uninitialised contiguous tensors of these shapes and dtypes on `device`. The memory goes when the last one does.

    Raises PlanError when there is no room for them.
    """
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layouts]
    spans = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    parts = SlotArena(1, sum(spans), device).record(0).split(spans)
    return [part[:size].view(dtype).view(shape)
            for part, size, (shape, dtype) in zip(parts, sizes, layouts, strict=True)]  # fmt: skip
