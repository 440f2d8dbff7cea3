"""The arena is one allocation cut into equal slots, each page-aligned and exactly one expert record long."""

from __future__ import annotations

import mmap

import torch

from engine.errors import PlanError


class SlotArena:
    """`slots` x `record_bytes` of memory on `device`. `pinned` host memory falls back to pageable where refused.

    Pageable host memory comes from an anonymous mapping: it is page-aligned as direct reads need, untouched pages
    cost nothing, and `close` gives all of it back to the operating system at once.
    """

    def __init__(self, slots: int, record_bytes: int, device: torch.device, pinned: bool = False) -> None:
        self.slots, self.record_bytes, self.device = slots, record_bytes, device
        self.bytes = slots * record_bytes
        self.pinned = False
        self._mapping: mmap.mmap | None = None
        try:
            self.buffer = self._allocate(pinned)
        except (RuntimeError, OSError, MemoryError) as error:
            raise PlanError(f"cannot allocate {self.bytes} bytes of expert slots on {device}: lower the expert memory "
                            f"({type(error).__name__})") from error  # fmt: skip

    def _allocate(self, pinned: bool) -> torch.Tensor:
        shape = (self.slots, self.record_bytes)
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        if pinned and torch.cuda.is_available():
            try:
                buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
                self.pinned = True
                return buffer
            except RuntimeError:  # the pinned quota is used up (Windows and WSL cap it): pageable works, only slower
                torch.cuda.synchronize()
        self._mapping = mmap.mmap(-1, max(self.bytes, mmap.PAGESIZE))
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=self.bytes).view(shape)

    def record(self, slot: int) -> torch.Tensor:
        """The slot's bytes [record_bytes] uint8, a view."""
        return self.buffer[slot]

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes as a writable buffer, for a host arena."""
        return memoryview(self.buffer[slot].numpy())

    def close(self) -> None:
        """Give the memory back. No view of any slot may be used afterwards."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self._mapping is not None:
            try:
                self._mapping.close()
            except BufferError:  # a view is still alive somewhere; the mapping goes when the last one does
                pass
            self._mapping = None
