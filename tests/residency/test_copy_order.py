"""A copy comes after the last use of its slot and before the next; its host slot is given back when it has ended."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.errors import ReadError
from engine.memory.arena import SlotArena
from engine.residency.build import device_tier
from engine.residency.copy import CopyFetcher, EmulatedLink
from engine.residency.policy import Lfru
from engine.residency.tier import IN_FLIGHT, Tier
from tests.residency.manual_fetcher import until
from tests.residency.test_stress import EXPERTS, LAYERS, RECORD, make_tier


class StepMark:
    """A mark that the test reaches."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(30)


class StepLink:
    """A link whose copies end when the test says so, and that records what it was asked."""

    name = "stepped"

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor, object, StepMark]] = []
        self.ordered: list[StepMark] = []
        self.begun = threading.Semaphore(0)
        self.computed = 0

    def copy(self, source, target, after) -> StepMark:
        mark = StepMark()
        self.copies.append((source, target, after, mark))
        self.begun.release()
        return mark

    def finish(self, index: int) -> None:
        source, target, _, mark = self.copies[index]
        target.copy_(source)
        mark.reached.set()

    def order_compute(self, mark) -> None:
        self.ordered.append(mark)
        mark.synchronize()

    def mark_compute(self) -> str:
        self.computed += 1
        return f"use {self.computed}"

    def close(self) -> None: ...


def test_a_copy_waits_for_the_last_use_of_its_slot_and_the_next_use_for_the_copy():
    link = StepLink()
    tier = device_tier(make_tier(slots=8, seed=0), 1, torch.device("cpu"), link)
    for index, key in enumerate((3, 4)):
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(use, tier, key)
            assert link.begun.acquire(timeout=30)
            assert link.copies[index][2] == (None if index == 0 else "use 1")
            link.finish(index)
        assert result.result() == [key]
        assert link.ordered[-1] is link.copies[index][3]
    tier.close()


def use(tier: Tier, key: int) -> list[int]:
    """What the slot of `key` holds while it is leased."""
    return [int(tier.arena.record(slot)[0]) for batch in tier.lease([key]) for _, slot in batch]


def test_an_expert_whose_copy_is_under_way_is_late():
    link = StepLink()
    tier = device_tier(make_tier(slots=8, seed=0), 4, torch.device("cpu"), link)
    tier.prefetch([2], 2**40)
    assert link.begun.acquire(timeout=30)
    tier.settle()  # the copy is ordered, which is all a device slot needs to be ready
    with ThreadPoolExecutor(1) as pool:
        pool.submit(use, tier, 2)
        until(lambda: link.ordered)
        link.finish(0)
    assert (tier.counters.hits, tier.counters.late, tier.counters.misses) == (0, 1, 0)
    assert use(tier, 2) == [2]
    assert tier.counters.hits == 1
    tier.close()


def test_the_host_slots_of_ended_copies_are_given_back():
    host = make_tier(slots=2, seed=0)
    tier = device_tier(host, LAYERS * EXPERTS, torch.device("cpu"), EmulatedLink(1e9))
    for layer in range(LAYERS):
        keys = list(range(layer * EXPERTS, (layer + 1) * EXPERTS))
        seen = {key: int(tier.arena.record(slot)[0]) for batch in tier.lease(keys) for key, slot in batch}
        assert seen == {key: key for key in keys}
    fetcher = tier.fetcher
    fetcher.close()
    assert not fetcher._under_way
    assert not any(host._users)


def test_a_read_error_below_reaches_the_one_who_waits_above():
    tier = device_tier(make_tier(slots=4, seed=0, failures=1.0), 4, torch.device("cpu"), EmulatedLink(1e9))
    with pytest.raises(ReadError, match="expert 5 is unlucky"):
        list(tier.lease([5]))
    with pytest.raises(ReadError, match="expert 6 is unlucky"):
        list(tier.lease([6]))
    tier.close()


def test_bytes_and_residency_of_a_device_tier():
    host, link = make_tier(slots=8, seed=0), EmulatedLink(1e9)
    arena = SlotArena(3, RECORD, torch.device("cpu"))
    fetcher = CopyFetcher(host, arena, link)
    tier = Tier(LAYERS, EXPERTS, arena, fetcher, Lfru(LAYERS, EXPERTS, 20))
    list(tier.lease([0, 1, 9]))
    assert fetcher.meter.bytes == 3 * RECORD
    assert (tier.residency() != 0).sum() == 3
    assert IN_FLIGHT not in tier.residency()
    tier.close()
