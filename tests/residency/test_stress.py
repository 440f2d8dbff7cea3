"""Random traffic from several threads: every expert asked for comes, is the right one, and nothing stands still."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from engine.errors import ReadError
from engine.memory.arena import SlotArena
from engine.residency.build import device_tier
from engine.residency.copy import EmulatedLink
from engine.residency.fetch import QueuedFetcher
from engine.residency.policy import Lfru
from engine.residency.tier import Tier

LAYERS, EXPERTS, RECORD = 3, 8, 4096
SECONDS = 120  # for all of a test's threads: generous, and the test fails instead of hanging


class Source(QueuedFetcher):
    """Fills a slot with its key; sometimes dawdles, sometimes fails."""

    def __init__(self, arena: SlotArena, seed: int, failures: float) -> None:
        super().__init__(3, "source")
        self._arena, self._random, self._failures = arena, random.Random(seed), failures

    def transfer(self, key: int, slot: int) -> int:
        if self._random.random() < 0.2:
            time.sleep(self._random.random() / 1000)
        if self._random.random() < self._failures:
            self._arena.record(slot).fill_(255)
            raise ReadError(f"expert {key} is unlucky")
        self._arena.record(slot).fill_(key)
        return RECORD


def make_tier(slots: int, seed: int, failures: float = 0.0) -> Tier:
    arena = SlotArena(slots, RECORD, torch.device("cpu"))
    return Tier(LAYERS, EXPERTS, arena, Source(arena, seed, failures), Lfru(LAYERS, EXPERTS, 20))


class Visitor:
    """Walks the layers like a model: forecasts, begins, leases; stops early now and then."""

    def __init__(self, tier: Tier, seed: int, steps: int) -> None:
        self.tier, self.random, self.steps = tier, random.Random(seed), steps
        self.asked = self.failed = 0
        self.problem: Exception | None = None

    def walk(self) -> None:
        try:
            for step in range(self.steps):
                self.visit(step % LAYERS)
        except Exception as error:  # noqa: BLE001 - carried to the test's thread
            self.problem = error

    def visit(self, layer: int) -> None:
        keys = [layer * EXPERTS + e for e in self.random.sample(range(EXPERTS), self.random.randint(0, EXPERTS))]
        if self.random.random() < 0.5:
            self.tier.begin(keys)
        if self.random.random() < 0.5:
            following = (layer + 1) % LAYERS * EXPERTS
            forecast = [following + e for e in self.random.sample(range(EXPERTS), 3)]
            self.tier.prefetch(forecast, self.tier.clock + 2)
        got: list[int] = []
        self.asked += len(keys)
        lease = self.tier.lease(keys)
        try:
            for batch in lease:
                for key, slot in batch:
                    assert (self.tier.arena.record(slot) == key).all()
                got += [key for key, _ in batch]
                if self.random.random() < 0.02:
                    lease.close()
                    return
            assert sorted(got) == sorted(keys)
        except ReadError:
            self.failed += 1


def run(tier: Tier, visitors: list[Visitor]) -> None:
    threads = [threading.Thread(target=visitor.walk, daemon=True) for visitor in visitors]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), "the tier stands still"
    for visitor in visitors:
        if visitor.problem:
            raise visitor.problem
    tier.settle()
    counters = tier.counters
    assert counters.hits + counters.late + counters.misses == sum(visitor.asked for visitor in visitors)
    assert not any(tier._users)


@pytest.mark.parametrize(("slots", "failures"), [(1, 0.0), (3, 0.0), (8, 0.1), (11, 0.0), (11, 0.1), (24, 0.5)])
def test_one_visitor(slots, failures):
    tier = make_tier(slots, seed=slots, failures=failures)
    visitor = Visitor(tier, seed=slots, steps=300)
    run(tier, [visitor])
    assert bool(visitor.failed) == bool(failures)
    tier.close()


@pytest.mark.parametrize(("slots", "failures"), [(1, 0.0), (3, 0.1), (2 * EXPERTS, 0.1)])
def test_two_visitors_at_once(slots, failures):
    tier = make_tier(slots, seed=1, failures=failures)
    run(tier, [Visitor(tier, seed=1, steps=200), Visitor(tier, seed=2, steps=200)])
    tier.close()


@pytest.mark.parametrize(("device_slots", "host_slots"), [(3, 2), (5, 12), (24, 24)])
def test_a_device_tier_over_a_host_tier(device_slots, host_slots):
    host = make_tier(host_slots, seed=5)
    tier = device_tier(host, device_slots, torch.device("cpu"), EmulatedLink(2e9, 1e-5))
    visitor = Visitor(tier, seed=6, steps=200)
    run(tier, [visitor])
    tier.close()
