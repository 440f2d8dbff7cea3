"""A fetcher that fetches only when a test says so, and a lease that runs beside the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from engine.memory.arena import SlotArena
from engine.residency.fetch import LinkMeter
from engine.residency.policy import Lfru
from engine.residency.tier import Tier

SECONDS = 30  # longer than any wait of a test that is not stuck


def until(condition: Callable[[], bool]) -> None:
    """Wait until another thread has brought `condition` about."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


class ManualFetcher:
    """Keeps submitted requests until `next` begins the most urgent one and `finish` ends it."""

    def __init__(self) -> None:
        self.meter = LinkMeter()
        self.begun: dict[int, int] = {}  # key -> slot of transfers under way
        self._queue: list[tuple[int, int, int, int, int]] = []
        self._count = 0
        self._submitted = threading.Condition()

    def start(self, claim, done) -> None:
        self._claim, self._done = claim, done

    def submit(self, key: int, slot: int, ticket: int, urgency: int) -> None:
        with self._submitted:
            self._queue.append((urgency, self._count, key, slot, ticket))
            self._count += 1
            self._submitted.notify_all()

    def in_flight(self, slot: int) -> bool:
        return False

    def on_lease(self, slots: list[int]) -> None: ...

    def on_release(self, slots: list[int]) -> None: ...

    def close(self) -> None: ...

    # -- the test's side ---------------------------------------------------------------------------------------------

    def queued(self) -> list[int]:
        """Keys in the order they would be fetched."""
        with self._submitted:
            return [key for _, _, key, _, _ in sorted(self._queue)]

    def wait_for(self, key: int) -> None:
        """Wait until `key` is queued."""
        with self._submitted:
            assert self._submitted.wait_for(lambda: any(q[2] == key for q in self._queue), SECONDS)

    def next(self) -> int | None:
        """Begin the most urgent request; its key, or None when the tier does not want it any more."""
        with self._submitted:
            self._queue.sort()
            _, _, key, slot, ticket = self._queue.pop(0)
        if not self._claim(slot, ticket):
            return None
        self.begun[key] = slot
        return key

    def finish(self, key: int, error: Exception | None = None) -> None:
        self._done(self.begun.pop(key), error)

    def fetch(self) -> int | None:
        """`next`, and finish it."""
        key = self.next()
        if key is not None:
            self.finish(key)
        return key

    def serve(self) -> None:
        """From now on fetch what is submitted, in a thread."""

        def run() -> None:
            while True:
                with self._submitted:
                    self._submitted.wait_for(lambda: self._queue)
                self.fetch()

        threading.Thread(target=run, daemon=True).start()


class Lease:
    """A lease in a thread of its own, which holds each batch until the test lets it go on."""

    def __init__(self, tier: Tier, keys: list[int]) -> None:
        self.batches: list[list[int]] = []
        self.slots: dict[int, int] = {}
        self.error: Exception | None = None
        self._tier, self._keys = tier, keys
        self._arrived = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for batch in self._tier.lease(self._keys):
                self.batches.append([key for key, _ in batch])
                self.slots.update(batch)
                self._arrived.release()
                self._go_on.acquire()
        except Exception as error:  # noqa: BLE001 - for the test to look at
            self.error = error

    def batch(self) -> list[int]:
        """Wait for the next batch; its keys. It stays held."""
        assert self._arrived.acquire(timeout=SECONDS)
        return self.batches[-1]

    def go_on(self) -> None:
        """Let go of the batch that is held."""
        self._go_on.release()

    def end(self) -> None:
        """Wait for the end of the lease, whose batches are all let go."""
        self._go_on.release(100)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def make_tier(slots: int, layers: int = 2, experts: int = 8, fetcher=None) -> tuple[Tier, ManualFetcher]:
    fetcher = fetcher or ManualFetcher()
    arena = SlotArena(slots, 4096, torch.device("cpu"))
    return Tier(layers, experts, arena, fetcher, Lfru(layers, experts, 64)), fetcher


def fill(tier: Tier, fetcher: ManualFetcher, keys: list[int]) -> None:
    """Bring `keys` in by a lease each, so that they are resident, unprotected, and used in this order."""
    for key in keys:
        lease = Lease(tier, [key])
        fetcher.wait_for(key)
        assert fetcher.fetch() == key
        lease.end()
