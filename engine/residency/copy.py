"""A copy fills a device slot from a host slot in stream order: after the slot's last use, before its next, with no
host wait.

`CopyFetcher` orchestrates, a `Link` copies. On CUDA the link is a copy stream with events; on a machine without one, an
emulated link of set bandwidth and latency runs the very same orchestration.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from engine.memory.arena import SlotArena
from engine.residency.fetch import QueuedFetcher
from engine.residency.tier import Tier

_UNDER_WAY = 3


class Mark(Protocol):
    """A point in the work given to a device. `query`: whether it is reached; `synchronize`: wait for it on the host."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Link(Protocol):
    """Copies host memory to device memory, one after another.

    copy: begin copying `source` to `target` (uint8, equal length) once `after` is reached; the mark of its end.
    order_compute: whatever is computed from now on comes after `mark`. mark_compute: the end of what was computed so
    far.
    """

    name: str

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Mark | None) -> Mark: ...

    def order_compute(self, mark: Mark) -> None: ...

    def mark_compute(self) -> Mark | None: ...

    def close(self) -> None: ...


class CudaLink:
    """PCIe: copies on a stream of their own, ordered against the compute stream by events."""

    name = "PCIe"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Mark | None) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            mark = torch.cuda.Event()
            mark.record(self._stream)
        return mark

    def order_compute(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def mark_compute(self) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def close(self) -> None:
        self._stream.synchronize()


class _Arrival:
    """A mark that is reached at the time `at`, in seconds of time.perf_counter()."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        while (rest := self.at - time.perf_counter()) > 0:
            time.sleep(rest)


class EmulatedLink:
    """Copies within RAM at once; a copy has arrived when a link of `bandwidth` bytes a second and `latency_s` would have
    delivered it after those before it."""

    name = "emulated"

    def __init__(self, bandwidth: float, latency_s: float = 0.0) -> None:
        self.bandwidth, self.latency_s = bandwidth, latency_s
        self._free_at = 0.0

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Mark | None) -> _Arrival:
        if after is not None:
            after.synchronize()
        # Not torch's copy: its threads would be a second team beside those that compute, and OpenMP, which then counts more
        # threads than cores, puts all of them to sleep at every barrier: computing took twice as long.
        np.copyto(target.numpy(), source.numpy())
        self._free_at = max(self._free_at, time.perf_counter()) + self.latency_s + source.numel() / self.bandwidth
        return _Arrival(self._free_at)

    def order_compute(self, mark: Mark) -> None:
        mark.synchronize()

    def mark_compute(self) -> None:
        return None  # host computation is over when it returns

    def close(self) -> None:
        """Nothing is under way."""


class CopyFetcher(QueuedFetcher):
    """Fills the slots of a device tier from a host tier over `link`, for one thread that computes.

    A device slot counts as ready as soon as its copy is under way: computation is ordered after the copy by its mark.
    The host slot stays leased until the copy has ended. One thread, so that copies keep the order of their urgency.
    """

    def __init__(self, host: Tier, arena: SlotArena, link: Link) -> None:
        super().__init__(1, "device-copy")
        self.host, self.link = host, link
        self._arena = arena
        self._copied: list[Mark | None] = [None] * arena.slots
        self._used: list[Mark | None] = [None] * arena.slots
        self._under_way: deque[tuple[Mark, Iterator, int]] = deque()
        # Copies under way: enough that the link never waits for the next, few enough that urgent ones need not wait long.
        self._most = min(_UNDER_WAY, max(1, host.arena.slots // 2))

    def submit(self, key: int, slot: int, ticket: int, urgency: int) -> None:
        """Also has the host tier fetch the record, so that reads of all queued experts overlap."""
        self.host.prefetch([key], self.host.clock + self.host.keys, urgency)
        super().submit(key, slot, ticket, urgency)

    def transfer(self, key: int, slot: int) -> None:
        lease = self.host.lease([key])
        [(_, host_slot)] = next(lease)
        source = self.host.arena.record(host_slot)
        mark = self.link.copy(source, self._arena.record(slot), self._used[slot])
        self._copied[slot] = mark
        self._under_way.append((mark, lease, source.numel()))
        self._finish(wait=len(self._under_way) >= self._most)

    def idle(self) -> None:
        """Nothing is queued: give the host slots of ended copies back."""
        while self._under_way:
            self._finish(wait=True)

    @property
    def under_way(self) -> int:
        """Copies that have begun and not ended."""
        return len(self._under_way)

    @property
    def busy(self) -> bool:
        """Whether any copy is queued or under way."""
        return bool(self._queue or self._under_way)

    def in_flight(self, slot: int) -> bool:
        mark = self._copied[slot]
        return mark is not None and not mark.query()

    def on_lease(self, slots: list[int]) -> None:
        for slot in slots:
            mark, self._copied[slot] = self._copied[slot], None
            if mark is not None:
                self.link.order_compute(mark)

    def on_release(self, slots: list[int]) -> None:
        mark = self.link.mark_compute()
        for slot in slots:
            self._used[slot] = mark

    def _finish(self, wait: bool) -> None:
        """Close the leases of ended copies; with `wait`, of the oldest one at least."""
        while self._under_way and (wait or self._under_way[0][0].query()):
            mark, lease, size = self._under_way.popleft()
            mark.synchronize()
            self.meter.end(size)
            lease.close()
            wait = False

    def close(self) -> None:
        super().close()
        self.idle()
        self.link.close()
        self.host.close()
