"""The tier's rules, one by one, with a fetcher that does nothing by itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine.errors import ReadError
from engine.residency.tier import ABSENT, HIT, IN_FLIGHT, MISSED, READY, RESIDENT
from tests.residency.manual_fetcher import Lease, fill, make_tier, until

FAR = 2**40  # a deadline that does not pass


def counts(tier) -> tuple[int, int, int]:
    return tier.counters.hits, tier.counters.late, tier.counters.misses


def resident(tier) -> list[int]:
    """Keys that a lease would find ready."""
    return [key for key, slot in enumerate(tier._slot_of) if slot >= 0 and tier._state[slot] == READY]


def test_resident_experts_come_first_and_the_others_as_they_arrive():
    tier, fetcher = make_tier(slots=4)
    fill(tier, fetcher, [5])
    lease = Lease(tier, [3, 5, 7])
    assert lease.batch() == [5]
    lease.go_on()
    assert {fetcher.next(), fetcher.next()} == {3, 7}
    for key in (7, 3):
        fetcher.finish(key)
        assert lease.batch() == [key]
        lease.go_on()
    lease.end()
    assert lease.error is None
    assert len(set(lease.slots.values())) == 3


def test_a_slot_in_use_is_never_a_victim():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [0, 1])
    holder = Lease(tier, [0, 1])
    assert holder.batch() == [0, 1]
    tier.prefetch([2], FAR)
    assert fetcher.queued() == []
    demand = Lease(tier, [3])
    holder.go_on()  # only now can 3 have a slot
    fetcher.wait_for(3)
    fetcher.fetch()
    assert demand.batch() == [3]
    demand.end()
    holder.end()


def test_a_slot_that_is_loading_is_never_a_victim():
    tier, fetcher = make_tier(slots=2)
    tier.prefetch([0, 1], deadline=0)
    assert fetcher.next() == 0
    tier.prefetch([2], FAR)
    assert fetcher.queued() == [1]
    demand = Lease(tier, [3])
    fetcher.finish(0)  # its time has passed: it gives way
    fetcher.wait_for(3)
    assert fetcher.fetch() == 3
    demand.end()
    assert fetcher.fetch() is None  # so has 1's, before it was begun
    assert fetcher.fetch() == 2  # which had waited for a slot
    assert resident(tier) == [2]


def test_demands_go_before_prefetches_and_near_prefetches_before_far_ones():
    tier, fetcher = make_tier(slots=8)
    tier.prefetch([0, 1], deadline=FAR)
    tier.prefetch([2], deadline=FAR - 1)
    demand = Lease(tier, [9])
    fetcher.wait_for(9)
    assert [fetcher.next() for _ in range(4)] == [9, 2, 0, 1]
    fetcher.finish(9)
    demand.end()


def test_a_demand_joins_a_prefetch_that_is_queued_and_promotes_it():
    tier, fetcher = make_tier(slots=8)
    tier.prefetch([0, 1], FAR)
    demand = Lease(tier, [1])
    until(lambda: fetcher.queued() == [1, 0, 1])  # asked for again, more urgently
    assert fetcher.fetch() == 1
    assert demand.batch() == [1]
    demand.end()
    assert fetcher.next() == 0
    assert fetcher.next() is None  # 1 is not fetched twice
    assert counts(tier) == (0, 1, 0)


def test_a_demand_joins_a_prefetch_that_is_under_way():
    tier, fetcher = make_tier(slots=8)
    tier.prefetch([4], FAR)
    assert fetcher.next() == 4
    demand = Lease(tier, [4])
    fetcher.finish(4)
    assert demand.batch() == [4]
    demand.end()
    assert fetcher.queued() == []
    assert counts(tier) in ((0, 1, 0), (1, 0, 0))  # late, unless the lease thread was slower than the fetch


def test_a_prefetch_whose_time_has_passed_is_given_up():
    tier, fetcher = make_tier(slots=2)
    tier.prefetch([0], deadline=1)
    tier.prefetch([1], deadline=3)
    for _ in range(2):
        assert list(tier.lease([])) == []  # a step each
    assert fetcher.next() is None
    assert tier.residency().flatten()[0] == ABSENT
    assert fetcher.next() == 1
    fetcher.finish(1)
    assert resident(tier) == [1]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_more_keys_than_slots_all_come_once(slots):
    tier, fetcher = make_tier(slots)
    fetcher.serve()
    got = [key for batch in tier.lease(list(range(7))) for key, _ in batch]
    assert sorted(got) == list(range(7))
    assert counts(tier) == (0, 0, 7)


def test_a_lease_keeps_what_it_is_about_to_use_when_it_needs_slots():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [0, 1])
    lease = Lease(tier, [2, 0])  # 0 is the least used, and wanted
    fetcher.wait_for(2)
    assert lease.batch() == [0]
    assert fetcher.fetch() == 2
    lease.end()
    assert resident(tier) == [0, 2]
    assert counts(tier) == (1, 0, 3)


def test_an_error_reaches_the_one_who_waits_and_the_tier_goes_on():
    tier, fetcher = make_tier(slots=2)
    lease = Lease(tier, [0, 1])
    assert fetcher.next() == 0
    assert fetcher.next() == 1
    error = ReadError("gone")
    fetcher.finish(1, error)
    fetcher.finish(0)
    lease.end()
    assert lease.error is error
    fill(tier, fetcher, [1])  # works again
    fetcher.serve()
    got = [key for batch in tier.lease([2, 3]) for key, _ in batch]  # and no slot was lost or is still held
    assert sorted(got) == [2, 3]


def test_an_error_reaches_all_who_wait_for_the_same_expert():
    tier, fetcher = make_tier(slots=2)
    first = Lease(tier, [0])
    fetcher.wait_for(0)
    assert fetcher.next() == 0
    second = Lease(tier, [0])
    until(lambda: tier.counters.late)
    fetcher.finish(0, ReadError("gone"))
    first.end()
    second.end()
    assert [type(first.error), type(second.error)] == [ReadError, ReadError]
    fill(tier, fetcher, [0])


def test_the_error_of_a_prefetch_reaches_nobody():
    tier, fetcher = make_tier(slots=2)
    tier.prefetch([0], FAR)
    fetcher.next()
    fetcher.finish(0, ReadError("gone"))
    fill(tier, fetcher, [1, 0])
    assert resident(tier) == [0, 1]


def test_leaving_a_lease_early_lets_its_slots_go():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [0])
    lease = tier.lease([0, 1])
    assert next(lease) == [(0, tier._slot_of[0])]
    lease.close()
    fetcher.serve()
    assert sorted(key for batch in tier.lease([2, 3]) for key, _ in batch) == [2, 3]
    assert not any(tier._users)


def test_begin_counts_what_was_absent_as_missed_however_soon_it_arrives():
    tier, fetcher = make_tier(slots=4)
    fill(tier, fetcher, [0])
    tier.reset_counters()
    tier.begin([0, 1])
    assert fetcher.fetch() == 1
    lease = Lease(tier, [0, 1])
    assert lease.batch() == [0, 1]
    lease.end()
    assert counts(tier) == (1, 0, 1)
    assert list(tier.residency()[0, :2]) == [HIT, MISSED]
    assert len(list(tier.lease([0, 1]))) == 1
    assert counts(tier) == (3, 0, 1)  # once missed, found from then on


def test_a_prefetch_never_takes_the_slot_of_a_forecast_expert():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [0, 1])
    tier.prefetch([1], deadline=tier.clock + 1)
    tier.prefetch([2, 3], deadline=tier.clock + 2)
    assert fetcher.queued() == [2]  # in 0's place; 3 finds none
    assert tier.residency().flatten()[1] in (RESIDENT, MISSED)


def test_a_prefetch_does_not_evict_what_it_asks_for_itself():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [1, 0])  # 1 is the least recently used
    tier.prefetch([2, 1], deadline=tier.clock + 1)
    assert fetcher.queued() == [2]
    fetcher.fetch()
    assert resident(tier) == [1, 2]


def test_a_prefetch_that_finds_no_slot_still_protects_what_is_there():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [0, 1])
    tier.prefetch([0], deadline=tier.clock + 9)
    tier.prefetch([2, 3, 1], deadline=tier.clock + 9)
    assert fetcher.queued() == []
    tier.prefetch([4], deadline=tier.clock + 1)
    assert fetcher.queued() == []


def test_a_demand_takes_the_unforecast_first_and_then_the_one_forecast_furthest_off():
    tier, fetcher = make_tier(slots=3)
    fill(tier, fetcher, [0, 1, 2])
    tier.prefetch([0], deadline=tier.clock + 9)
    tier.prefetch([1], deadline=tier.clock + 5)
    fill(tier, fetcher, [3])
    assert resident(tier) == [0, 1, 3]
    tier.prefetch([3], deadline=tier.clock + 5)
    fill(tier, fetcher, [4])
    assert resident(tier) == [1, 3]
    assert fetcher.fetch() == 0  # its forecast still stands, and 4 was used
    assert resident(tier) == [0, 1, 3]


def test_forecasts_wait_for_slots_in_the_order_of_their_deadlines():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [0, 1])
    tier.prefetch([0, 1], deadline=tier.clock + 1)
    tier.prefetch([5], deadline=tier.clock + 8)
    tier.prefetch([4], deadline=tier.clock + 4)
    assert fetcher.queued() == []
    lease = Lease(tier, [0, 1])
    assert lease.batch() == [0, 1]
    lease.go_on()
    lease.end()
    assert fetcher.queued() == [4, 5]
    assert fetcher.fetch() == 4


def test_forgotten_forecasts_neither_protect_nor_wait():
    tier, fetcher = make_tier(slots=2)
    fill(tier, fetcher, [0, 1])
    tier.prefetch([0, 1], deadline=FAR)
    tier.prefetch([2], deadline=FAR)
    tier.forget_forecasts()
    fill(tier, fetcher, [3])
    assert fetcher.queued() == []
    assert 3 in resident(tier) and len(resident(tier)) == 2


def test_protection_ends_with_its_step():
    tier, fetcher = make_tier(slots=1)
    fill(tier, fetcher, [0])
    tier.prefetch([0], deadline=tier.clock + 1)
    tier.prefetch([1], deadline=tier.clock + 1)
    assert fetcher.queued() == []
    assert list(tier.lease([])) == []
    assert list(tier.lease([])) == []
    tier.prefetch([1], deadline=tier.clock + 1)
    assert fetcher.queued() == [1]


def test_the_residency_map():
    tier, fetcher = make_tier(slots=8, layers=2, experts=4)
    fill(tier, fetcher, [0, 1])
    tier.prefetch([2], FAR)
    tier.prefetch([5, 6], FAR)
    assert [fetcher.fetch(), fetcher.next(), fetcher.next()] == [2, 5, 6]
    assert tier.residency().tolist() == [[RESIDENT, MISSED, RESIDENT, ABSENT], [ABSENT, IN_FLIGHT, IN_FLIGHT, ABSENT]]
    lease = Lease(tier, [0, 2])
    lease.batch()
    lease.end()
    assert tier.residency()[0].tolist() == [HIT, RESIDENT, HIT, ABSENT]
    late = Lease(tier, [5])
    until(lambda: tier.counters.late)
    fetcher.finish(5)
    late.end()
    assert tier.residency()[1].tolist() == [ABSENT, MISSED, IN_FLIGHT, ABSENT]
    assert tier.residency().dtype == np.uint8


def test_settle_waits_for_what_is_queued_and_under_way():
    tier, fetcher = make_tier(slots=4)
    tier.settle()
    tier.prefetch([0], FAR)
    tier.prefetch([1], FAR)
    assert fetcher.next() == 0
    settled = threading.Event()
    threading.Thread(target=lambda: (tier.settle(), settled.set()), daemon=True).start()
    assert not settled.wait(0.05)
    fetcher.finish(0)
    assert not settled.wait(0.05)
    fetcher.fetch()
    assert settled.wait(30)


def test_all_resident_tells_whether_every_expert_has_a_slot():
    assert make_tier(slots=16)[0].all_resident
    assert not make_tier(slots=15)[0].all_resident


def test_a_forecast_beyond_the_horizon_takes_free_slots_only_until_it_is_near():
    tier, fetcher = make_tier(slots=3)
    tier.horizon = 2
    fill(tier, fetcher, [0, 1])
    tier.prefetch([4, 5], deadline=tier.clock + 4)
    assert fetcher.queued() == [4]  # into the free slot
    for queued in ([4], [4, 5]):  # a step nearer each
        lease = Lease(tier, [0])
        assert lease.batch() == [0]
        lease.go_on()
        lease.end()
        assert sorted(fetcher.queued()) == queued
