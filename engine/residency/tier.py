"""A tier is a fixed arena of equal slots; a slot in use or loading is never a victim, and a missing expert is waited
for.

An expert is named by its key, layer * experts + expert. A slot is free, queued or loading (a fetch is on its way),
ready, or failed until all who wait for it know; `users` counts the leases that hold it. Each fetch carries a ticket, so
that a request that was overtaken or given up is recognised. Time is counted in leases: one MoE layer visited is one
step.
"""

from __future__ import annotations

import heapq
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.memory.arena import SlotArena
from engine.residency.fetch import DEMAND, Fetcher
from engine.residency.policy import Lfru

FREE, QUEUED, LOADING, READY, FAILED = range(5)
ABSENT, RESIDENT, IN_FLIGHT, HIT, MISSED = range(5)  # codes of the residency map
_NEVER = -1


@dataclass
class TierCounters:
    """Experts asked for since the last reset, by how they were found, and the time spent waiting, in seconds."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    elsewhere: int = 0  # of the misses, those computed without a slot
    stall_s: float = 0.0


class Tier:
    """Slots for layers x experts keys, filled by `fetcher`. Safe to use from several threads."""

    def __init__(
        self, layers: int, experts: int, arena: SlotArena, fetcher: Fetcher, policy: Lfru, horizon: int = 2**62
    ) -> None:
        self.layers, self.experts, self.keys = layers, experts, layers * experts
        self.arena, self.fetcher, self.policy = arena, fetcher, policy
        self.horizon = horizon  # steps: a forecast for later than this evicts nobody yet
        self.counters = TierCounters()
        self.clock = 0
        self.begins = True  # whether `begin` begins fetches; else it is decided at the lease what is fetched at all
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._slot_of = [_NEVER] * self.keys
        self._key_of = np.full(arena.slots, _NEVER)
        # Read and written one by one on every visit, where plain sequences are fastest; searched as arrays for a
        # victim.
        self._state = bytearray(arena.slots)
        self._users = array("i", bytes(4 * arena.slots))
        self._states = np.frombuffer(self._state, dtype=np.uint8)
        self._user_counts = np.frombuffer(self._users, dtype=np.int32)
        self._ticket = [0] * arena.slots
        self._deadline = np.full(
            arena.slots, _NEVER, dtype=np.int64
        )  # forecast for this step: protected till it is over
        self._free = list(range(arena.slots - 1, -1, -1))
        self._pending: list[tuple[int, int]] = []  # heap of (deadline, key): forecasts that found no slot yet
        self._begun: set[int] = set()  # absent when their routing became known: misses, however soon they arrive
        self._errors: dict[int, Exception] = {}  # of failed slots
        self._used_at = np.full(self.keys, _NEVER, dtype=np.int64)
        self._missed_at = np.full(self.keys, _NEVER, dtype=np.int64)
        fetcher.start(self._claim, self._done)

    # -- use ---------------------------------------------------------------------------------------------------------

    def lease(
        self, keys: list[int], meanwhile: Callable[[], None] | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield batches of (key, slot) until each of the distinct `keys` came once: resident ones first, then as they
        arrive. A batch's slots are held until the next batch is asked for. More keys than slots is fine.
        meanwhile: called once, when those that are there have been handed out, before any is waited for.

        Raises what the fetcher raised (ReadError) for an expert that could not be fetched.
        """
        held: dict[int, int] = {}
        with self._lock:
            self.clock += 1
            ready, waiting, absent = self._sort(keys)
            self._start(absent, waiting)
            self._start_pending()
        try:
            while True:
                held = dict(ready)
                for batch in self._in_order(ready):
                    slots = [slot for _, slot in batch]
                    began = time.perf_counter()
                    self.fetcher.on_lease(slots)
                    self.counters.stall_s += time.perf_counter() - began
                    yield batch
                    self.fetcher.on_release(slots)
                    with self._lock:
                        self._let_go(slots)
                        for key, _ in batch:
                            del held[key]
                        self._start(absent, waiting)
                        self._start_pending()
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                if not waiting and not absent:
                    return
                ready = self._wait(waiting, absent)
        finally:
            if held or waiting:  # left early: an error, or the consumer stopped
                with self._lock:
                    self._let_go([*held.values(), *waiting.values()])

    def begin(self, keys: list[int]) -> None:
        """Start fetching those of `keys` that are absent: the next lease will ask for them all."""
        with self._lock:
            if keys:
                self.policy.at(keys[0] // self.experts)
            self._begun.update(key for key in keys if self._slot_of[key] == _NEVER)
        if self.begins:
            self.prefetch(keys, self.clock + 1, DEMAND)

    def missing(self, keys: list[int]) -> list[int]:
        """Those of `keys` whose fetch has not started."""
        with self._lock:
            return [key for key in keys if (slot := self._slot_of[key]) == _NEVER or self._state[slot] == QUEUED]

    def elsewhere(self, keys: list[int]) -> None:
        """`keys` of the layer being visited are computed without a slot: misses and uses all the same."""
        with self._lock:
            self.counters.misses += len(keys)
            self.counters.elsewhere += len(keys)
            self.policy.touch(keys, self.clock)
            self._used_at[keys] = self._missed_at[keys] = self.clock

    def prefetch(self, keys: Iterable[int], deadline: int, urgency: int | None = None) -> None:
        """Have distinct `keys` in place by step `deadline`; those there are protected till they are used, or till then.

        urgency: order among waiting fetches, smaller first; the deadline by default. A prefetch never takes the slot of
        an expert that is forecast itself: it waits for one that was used. One for later than the horizon takes free slots
        only, and waits till it is nearer: where the slots cannot hold all that a token runs, experts that are used again
        and again would give way to those that are used once.
        """
        with self._lock:
            absent = []
            for key in keys:  # those that are there first, so that they do not make room for the others
                slot = self._slot_of[key]
                if slot == _NEVER:
                    absent.append(key)
                else:
                    self._deadline[slot] = max(self._deadline[slot], deadline)
            near = urgency is not None or deadline <= self.clock + self.horizon
            for key in absent:
                slot = self._take_slot(demand=False) if near or self._free else None
                if slot is None:
                    heapq.heappush(self._pending, (deadline, key))
                    continue
                self._load(key, slot, deadline if urgency is None else urgency)
                self._deadline[slot] = deadline

    def absent(self, plan: list[tuple[int, int]], keep: bool) -> list[tuple[int, int]]:
        """Those of `plan`, (step they are needed at, key) pairs, that have no slot; with `keep`, the others keep theirs till
        then."""
        with self._lock:
            absent = []
            for deadline, key in plan:
                slot = self._slot_of[key]
                if slot == _NEVER:
                    absent.append((deadline, key))
                elif keep:
                    self._deadline[slot] = max(self._deadline[slot], deadline)
        return absent

    def forget_forecasts(self) -> None:
        """Protect nothing and wait for no slot any more: what was forecast will not be asked for."""
        with self._lock:
            self._pending.clear()
            self._deadline[self._states == READY] = _NEVER

    def reset_counters(self) -> None:
        """Start counting anew."""
        self.counters = TierCounters()

    def settle(self) -> None:
        """Wait until no fetch is queued or under way."""
        with self._changed:
            while np.any((self._states == QUEUED) | (self._states == LOADING)):
                self._changed.wait()

    # -- looking -----------------------------------------------------------------------------------------------------

    def residency(self) -> np.ndarray:
        """uint8 [layers, experts]: ABSENT, RESIDENT, IN_FLIGHT; for experts of each layer's last visit HIT or
        MISSED."""
        with self._lock:
            state = np.zeros(self.keys, dtype=np.uint8)
            state[self._key_of[self._states == READY]] = RESIDENT
            state[self._key_of[(self._states == QUEUED) | (self._states == LOADING)]] = IN_FLIGHT
            used, missed = self._used_at.copy(), self._missed_at.copy()
        shape = (self.layers, self.experts)
        state, used, missed = state.reshape(shape), used.reshape(shape), missed.reshape(shape)
        visit = used.max(axis=1, keepdims=True)
        state[(used == visit) & (visit != _NEVER)] = HIT
        state[(missed == visit) & (visit != _NEVER)] = MISSED
        return state

    @property
    def fetch_s(self) -> float:
        """Seconds that fetching one expert takes, as far as is known; 0 before the first."""
        meter = self.fetcher.meter
        return meter.busy_now() * self.arena.record_bytes / meter.bytes if meter.bytes else 0.0

    @property
    def all_resident(self) -> bool:
        """Whether every expert has a slot, so that nothing is ever evicted."""
        return self.arena.slots >= self.keys

    def close(self) -> None:
        self.fetcher.close()
        self.arena.close()

    def _in_order(self, ready: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """What is there in one batch, then one by one what is usable in stream order only: each is computed as it comes."""
        there, coming = [], []
        for pair in ready:
            (coming if self.fetcher.in_flight(pair[1]) else there).append(pair)
        if there:
            yield there
        for pair in coming:
            yield [pair]

    # -- inside; the lock is held ------------------------------------------------------------------------------------

    def _sort(self, keys: list[int]) -> tuple[list[tuple[int, int]], dict[int, int], list[int]]:
        """Count and pin `keys`: (ready (key, slot) pairs, arriving key -> slot, absent keys)."""
        ready: list[tuple[int, int]] = []
        arriving: list[int] = []  # usable in stream order, but not there yet
        waiting: dict[int, int] = {}
        absent: list[int] = []
        for key in keys:
            slot = self._slot_of[key]
            if slot == _NEVER:
                absent.append(key)
                continue
            self._users[slot] += 1
            if self._state[slot] == READY:
                ready.append((key, slot))
                if self.fetcher.in_flight(slot):
                    arriving.append(key)
            else:
                waiting[key] = slot
                if self._state[slot] == QUEUED:
                    self.fetcher.submit(key, slot, self._ticket[slot], DEMAND)
        missed = absent
        if self._begun:
            missed = absent + [key for key in keys if key in self._begun and self._slot_of[key] != _NEVER]
            self._begun.clear()
        late = [key for key in [*waiting, *arriving] if key not in missed]
        self.counters.misses += len(missed)
        self.counters.late += len(late)
        self.counters.hits += len(keys) - len(missed) - len(late)
        if not self.all_resident:  # nobody ever gives way there
            self.policy.touch(keys, self.clock)
        self._used_at[keys] = self.clock
        if missed or late:
            self._missed_at[missed + late] = self.clock
        return ready, waiting, absent

    def _start(self, absent: list[int], waiting: dict[int, int]) -> None:
        """Move keys from `absent` to `waiting` while slots can be had."""
        while absent:
            key = absent[0]
            slot = self._slot_of[key]
            if slot == _NEVER:
                slot = self._take_slot(demand=True)
                if slot is None:
                    return
                self._load(key, slot, DEMAND)
            self._users[slot] += 1
            waiting[key] = slot
            absent.pop(0)

    def _start_pending(self) -> None:
        """Begin the forecasts that found no slot, soonest needed first, while slots can be had now."""
        while self._pending and (self._free or self._pending[0][0] <= self.clock + self.horizon):
            deadline, key = self._pending[0]
            if deadline > self.clock and self._slot_of[key] == _NEVER:
                slot = self._take_slot(demand=False)
                if slot is None:
                    return
                self._load(key, slot, deadline)
                self._deadline[slot] = deadline
            elif self._slot_of[key] != _NEVER:
                slot = self._slot_of[key]
                self._deadline[slot] = max(self._deadline[slot], deadline)
            heapq.heappop(self._pending)

    def _take_slot(self, demand: bool) -> int | None:
        """A free slot, else a victim's: the least used unprotected one; for a demand, then the one forecast furthest
        off, whose forecast waits for another slot."""
        if self._free:
            return self._free.pop()
        candidates = np.flatnonzero((self._states == READY) & (self._user_counts == 0))
        unprotected = candidates[self._deadline[candidates] < self.clock]
        if unprotected.size:
            slot = self.policy.victim(unprotected, self._key_of)
        elif demand and candidates.size:
            slot = int(candidates[np.argmax(self._deadline[candidates])])
            heapq.heappush(self._pending, (int(self._deadline[slot]), int(self._key_of[slot])))
        else:
            return None
        self._slot_of[self._key_of[slot]] = _NEVER
        return slot

    def _load(self, key: int, slot: int, urgency: int) -> None:
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._state[slot] = QUEUED
        self._deadline[slot] = _NEVER
        self._ticket[slot] += 1
        self.fetcher.submit(key, slot, self._ticket[slot], urgency)

    def _let_go(self, slots: list[int]) -> None:
        """End one use of each of `slots`; whoever waits for a slot may have them now."""
        for slot in slots:
            self._users[slot] -= 1
            if self._users[slot]:
                continue
            if self._deadline[slot] <= self.clock:
                self._deadline[slot] = _NEVER  # it was used: the forecast has come true
            if self._state[slot] == FAILED:
                self._free_slot(slot)
        self._changed.notify_all()

    def _free_slot(self, slot: int) -> None:
        self._errors.pop(slot, None)
        self._slot_of[self._key_of[slot]] = _NEVER
        self._key_of[slot] = _NEVER
        self._state[slot] = FREE
        self._free.append(slot)
        self._changed.notify_all()

    # -- inside; these take the lock ---------------------------------------------------------------------------------

    def _wait(self, waiting: dict[int, int], absent: list[int]) -> list[tuple[int, int]]:
        """Wait until some of `waiting` are ready; take them out and return them. The time spent is a stall."""
        began = time.perf_counter()
        with self._changed:
            while True:
                self._start(absent, waiting)  # first: what another thread fetched meanwhile is ready already
                error = next((self._errors[slot] for slot in waiting.values() if slot in self._errors), None)
                if error is not None:
                    raise error
                ready = [(key, slot) for key, slot in waiting.items() if self._state[slot] == READY]
                if ready:
                    break
                self._changed.wait()
            for key, _ in ready:
                del waiting[key]
            self.counters.stall_s += time.perf_counter() - began
        return ready

    def _claim(self, slot: int, ticket: int) -> bool:
        """Whether this fetch is still to be done. A prefetch whose time has passed is given up here."""
        with self._changed:
            if self._ticket[slot] != ticket or self._state[slot] != QUEUED:
                return False
            if self._users[slot] == 0 and self._deadline[slot] < self.clock:
                self._free_slot(slot)
                return False
            self._state[slot] = LOADING
            return True

    def _done(self, slot: int, error: Exception | None) -> None:
        with self._changed:
            if error is None:
                self._state[slot] = READY
            elif self._users[slot]:  # kept until all who wait for it have been told
                self._state[slot], self._errors[slot] = FAILED, error
            else:
                self._free_slot(slot)
            self._changed.notify_all()
