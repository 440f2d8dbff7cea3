"""A copy fills a device slot from a host slot in stream order: after the slot's last use, before its next, with no
host wait.

`CopyFetcher` orchestrates, a `Link` copies. On CUDA the link is a copy stream with events; on a machine without one, an
emulated link of set bandwidth and latency runs the very same orchestration.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch

from engine.memory.arena import SlotArena
from engine.residency.fetch import QueuedFetcher
from engine.residency.tier import Tier


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


class _HostMark:
    """A mark that a thread of this process reaches."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


class EmulatedLink:
    """Copies within RAM, no faster than `bandwidth` bytes a second and no sooner than `latency_s` after they are
    begun."""

    name = "emulated"

    def __init__(self, bandwidth: float, latency_s: float = 0.0) -> None:
        self.bandwidth, self.latency_s = bandwidth, latency_s
        self._queue: deque = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="emulated-link", daemon=True)
        self._thread.start()

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Mark | None) -> _HostMark:
        mark = _HostMark()
        with self._wake:
            self._queue.append((source, target, after, mark))
            self._wake.notify()
        return mark

    def order_compute(self, mark: Mark) -> None:
        mark.synchronize()

    def mark_compute(self) -> None:
        return None  # host computation is over when it returns

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if not self._queue:
                    return
                source, target, after, mark = self._queue.popleft()
            if after is not None:
                after.synchronize()
            began = time.perf_counter()
            target.copy_(source)
            rest = self.latency_s + source.numel() / self.bandwidth - (time.perf_counter() - began)
            if rest > 0:
                time.sleep(rest)
            mark.reach()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()


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
        self._most = max(1, host.arena.slots // 2)  # copies under way; the other host slots are for reads

    def submit(self, key: int, slot: int, ticket: int, urgency: int) -> None:
        """Also has the host tier fetch the record, so that reads of all queued experts overlap."""
        self.host.prefetch([key], self.host.clock + self.host.keys, urgency)
        super().submit(key, slot, ticket, urgency)

    def transfer(self, key: int, slot: int) -> int:
        lease = self.host.lease([key])
        [(_, host_slot)] = next(lease)
        source = self.host.arena.record(host_slot)
        mark = self.link.copy(source, self._arena.record(slot), self._used[slot])
        self._copied[slot] = mark
        self._under_way.append((mark, lease, source.numel()))
        self._finish(wait=len(self._under_way) > self._most)
        return source.numel()

    def idle(self) -> None:
        """Nothing is queued: give the host slots of ended copies back."""
        while self._under_way:
            self._finish(wait=True)

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
            mark, lease, _ = self._under_way.popleft()
            mark.synchronize()
            lease.close()
            wait = False

    def close(self) -> None:
        super().close()
        self.idle()
        self.link.close()
        self.host.close()
