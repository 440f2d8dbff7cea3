"""A fetcher fills a tier's slots from the tier below, most urgent first, and reports each slot done or failed."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol

from engine.memory.arena import SlotArena
from engine.store.reader import RecordReader

DEMAND = -1  # more urgent than any prefetch, whose urgency is its deadline


class Fetcher(Protocol):
    """`submit` queues the filling of a slot, again with more urgency to promote it.

    The fetcher asks `claim(slot, ticket)` right before it starts (False: no longer wanted) and calls
    `done(slot, error)` when it ends. `on_lease`/`on_release` bracket the use of slots by computation, for links
    that order copies against compute by events.
    """

    def start(self, claim: Callable[[int, int], bool], done: Callable[[int, Exception | None], None]) -> None: ...

    def submit(self, key: int, slot: int, ticket: int, urgency: int) -> None: ...

    def in_flight(self, slot: int) -> bool: ...

    def on_lease(self, slots: list[int]) -> None: ...

    def on_release(self, slots: list[int]) -> None: ...

    def close(self) -> None: ...


class LinkMeter:
    """Wall time during which at least one transfer was under way, and the bytes moved. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active, self._since = 0, 0.0
        self.bytes, self.busy_s = 0, 0.0

    def begin(self) -> None:
        with self._lock:
            if self._active == 0:
                self._since = time.perf_counter()
            self._active += 1

    def end(self, size: int) -> None:
        with self._lock:
            self._active -= 1
            self.bytes += size
            if self._active == 0:
                self.busy_s += time.perf_counter() - self._since

    def busy_now(self) -> float:
        """`busy_s`, the transfer under way included."""
        with self._lock:
            return self.busy_s + (time.perf_counter() - self._since if self._active else 0.0)


class QueuedFetcher:
    """Worker threads that take the most urgent request and `transfer` it. Base of the store and the copy fetchers."""

    def __init__(self, threads: int, name: str) -> None:
        self.meter = LinkMeter()
        self._count, self._name = threads, name
        self._queue: list[tuple[int, int, int, int, int]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def transfer(self, key: int, slot: int) -> int | None:
        """Fill `slot` with expert `key`; the bytes moved, or None when they still move: then the meter is told later."""
        raise NotImplementedError

    def start(self, claim: Callable[[int, int], bool], done: Callable[[int, Exception | None], None]) -> None:
        self._threads = [
            threading.Thread(target=self._run, args=(claim, done), name=f"{self._name}-{i}", daemon=True)
            for i in range(self._count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: int, slot: int, ticket: int, urgency: int) -> None:
        with self._wake:
            heapq.heappush(self._queue, (urgency, next(self._order), key, slot, ticket))
            self._wake.notify()

    def idle(self) -> None:
        """Called by a worker that finds nothing queued."""

    def in_flight(self, slot: int) -> bool:
        """Whether a ready slot's transfer is still under way."""
        return False

    def on_lease(self, slots: list[int]) -> None:
        """Nothing to order: the slot is ready before it is handed out."""

    def on_release(self, slots: list[int]) -> None:
        """Nothing to order: host computation is over when it returns."""

    def _run(self, claim: Callable[[int, int], bool], done: Callable[[int, Exception | None], None]) -> None:
        while True:
            with self._wake:
                empty = not self._queue
            if empty:
                self.idle()
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                _, _, key, slot, ticket = heapq.heappop(self._queue)
            if not claim(slot, ticket):
                continue
            self.meter.begin()
            size, error = 0, None
            try:
                size = self.transfer(key, slot)
            except Exception as caught:  # noqa: BLE001 - carried to the thread that waits for this expert
                error = caught
            if size is not None:
                self.meter.end(size)
            done(slot, error)

    def close(self) -> None:
        """Drop what is queued, wait for what is under way."""
        with self._wake:
            self._closed = True
            self._queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()


class StoreFetcher(QueuedFetcher):
    """Fills host slots with records read from the store."""

    def __init__(self, reader: RecordReader, arena: SlotArena, threads: int) -> None:
        super().__init__(threads, "store-read")
        self._reader, self._arena = reader, arena

    def transfer(self, key: int, slot: int) -> int:
        self._reader.read_into(key, self._arena.memory(slot))
        return self._reader.record_bytes

    def close(self) -> None:
        super().close()
        self._reader.close()
