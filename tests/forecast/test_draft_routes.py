"""Every drafted route is observed; what it names stays or is fetched for the layer that will verify it, in that order, and no
more of it while drafting than the link can move."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from engine.forecast.draft import DraftRoutes, Scheduling
from tests.residency.manual_fetcher import Lease, fill, make_tier

LAYERS, EXPERTS = 3, 8
INPUT = torch.zeros(1, 4)  # nobody looks at it


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def make(slots: int, resident: list[int] = (), **scheduling):
    """(forecast, tier, fetcher) with these keys resident, unprotected."""
    tier, fetcher = make_tier(slots, LAYERS, EXPERTS)
    fill(tier, fetcher, list(resident))
    targets = [SimpleNamespace(draft=None) for _ in range(LAYERS)]
    draft = SimpleNamespace(layers=["first", "second", "third"])
    return DraftRoutes(tier, targets, draft, gate=False, scheduling=Scheduling(**scheduling)), tier, fetcher


def route(forecast: DraftRoutes, *chosen: list[int]) -> None:
    """A token's forward: experts of each layer in turn."""
    for layer, ids in enumerate(chosen):
        forecast.on_routed(layer, INPUT, torch.tensor([ids]))


def measure_link(fetcher, clock: Clock, tier, seconds: float) -> None:
    """Let fetching one expert have taken so long."""
    fetcher.meter.begin()
    clock.now += seconds
    fetcher.meter.end(tier.arena.record_bytes)


def resident(tier) -> set[int]:
    """Keys that have a slot."""
    absent = tier.absent([(0, key) for key in range(tier.keys)], keep=False)
    return set(range(tier.keys)) - {key for _, key in absent}


def test_every_route_is_observed_and_named_experts_are_fetched_in_the_order_of_layers():
    forecast, tier, fetcher = make(slots=24)
    forecast.begin()
    route(forecast, [1, 2], [3, 4], [5, 6])
    forecast.drafted(1)
    assert sorted(fetcher.queued()) == [1, 2, 11, 12, 21, 22]
    route(forecast, [2, 7], [0, 3], [5, 1])
    forecast.drafted(0)
    forecast.end()
    order = fetcher.queued()
    assert sorted(order) == [1, 2, 7, 8, 11, 12, 17, 21, 22]  # once each, whichever token named it
    assert [key // EXPERTS for key in order] == sorted(key // EXPERTS for key in order)


def test_what_is_needed_sooner_overtakes_what_was_named_sooner():
    forecast, tier, fetcher = make(slots=24)
    forecast.begin()
    route(forecast, [1, 2], [1, 2], [1, 2])
    forecast.drafted(1)
    assert fetcher.fetch() == 1
    route(forecast, [3, 4], [1, 2], [1, 2])
    forecast.drafted(0)
    forecast.end()
    assert [fetcher.fetch() for _ in range(3)] == [2, 3, 4]


def after_one_draft(keep: bool) -> set[int]:
    """Keys that are resident when a window of one draft token has fetched what it could."""
    forecast, tier, fetcher = make(slots=5, resident=[0, 1, 2, 9, 18], keep=keep)
    forecast.begin()
    route(forecast, [0, 1], [3, 4], [5, 6])
    forecast.drafted(0)
    forecast.end()
    while fetcher.queued():
        fetcher.fetch()
    return resident(tier)


def test_named_experts_that_are_there_do_not_give_way():
    """Of five that are resident two are named, those that were used longest ago."""
    assert after_one_draft(keep=True) == {0, 1, 11, 12, 21}  # the last one named waits for a slot


def test_without_keeping_they_do():
    there = after_one_draft(keep=False)
    assert there > {11, 12, 21, 22} and not {0, 1} < there


def test_verification_makes_room_for_the_rest():
    forecast, tier, fetcher = make(slots=3)
    forecast.begin()
    route(forecast, [0, 1], [2, 3], [4, 5])
    forecast.drafted(0)
    forecast.end()
    assert fetcher.queued() == [0, 1, 10]
    while fetcher.queued():
        fetcher.fetch()
    lease = Lease(tier, [0, 1])
    assert lease.batch() == [0, 1]
    lease.end()  # their time is over once the next layer is visited
    lease = Lease(tier, [10, 11])
    fetcher.wait_for(11)
    assert lease.batch() == [10]
    lease.go_on()
    fetched = [fetcher.fetch() for _ in range(len(fetcher.queued()))]
    assert [key for key in fetched if key is not None] == [11, 20]
    lease.end()


def test_fetching_while_drafting_is_bounded_by_what_the_link_can_move(clock):
    """A draft token takes a second and fetching an expert two."""
    forecast, tier, fetcher = make(slots=24)
    measure_link(fetcher, clock, tier, 2.0)
    forecast.begin()
    begun = []
    for token, left in enumerate((3, 2, 1, 0)):
        route(forecast, [2 * token, 2 * token + 1], [token, 5], [token, 6])
        clock.now += 1
        forecast.drafted(left)
        begun.append(len(fetcher.queued()))
    assert begun == [2, 2, 2, 2]  # four seconds move two experts
    assert fetcher.queued() == [0, 1]
    forecast.end()
    assert len(fetcher.queued()) == 8 + 5 + 5
    assert fetcher.queued() == sorted(fetcher.queued())


def test_the_bound_grows_with_the_time_that_drafting_takes(clock):
    forecast, tier, fetcher = make(slots=24)
    measure_link(fetcher, clock, tier, 1.0)
    forecast.begin()
    begun = []
    for token, seconds in enumerate((1, 1, 3)):
        route(forecast, [2 * token, 2 * token + 1], [token, 5], [token, 6])
        clock.now += seconds
        forecast.drafted(0)
        begun.append(len(fetcher.queued()))
    assert begun == [1, 2, 5]


@pytest.mark.parametrize(("fetch", "before", "after"), [("drafting", 6, 6), ("after", 0, 6), ("none", 0, 0), ("auto", 6, 6)])
def test_when_fetching_begins_can_be_set(fetch, before, after):
    forecast, _, fetcher = make(slots=24, fetch=fetch)
    forecast.begin()
    route(forecast, [1, 2], [3, 4], [5, 6])
    forecast.drafted(0)
    assert len(fetcher.queued()) == before
    forecast.end()
    assert len(fetcher.queued()) == after


def test_no_expert_is_nobody():
    forecast, _, fetcher = make(slots=24)
    forecast.begin()
    route(forecast, [1, EXPERTS], [EXPERTS, EXPERTS], [EXPERTS, 2])
    forecast.drafted(0)
    forecast.end()
    assert fetcher.queued() == [1, 18]


def test_the_models_experts_are_the_drafts_while_drafting():
    forecast, *_ = make(slots=24)
    targets = forecast._targets
    forecast.begin()
    assert [target.draft for target in targets] == ["first", "second", "third"]
    forecast.end()
    assert [target.draft for target in targets] == [None] * 3


def verify(forecast: DraftRoutes, tier, fetcher, *chosen: list[int]) -> None:
    """Run the window's verification: each layer's distinct experts."""
    for layer, ids in enumerate(chosen):
        forecast.on_routed(layer, INPUT, torch.tensor([[i] for i in ids]))
        while fetcher.queued():
            fetcher.fetch()
        lease = Lease(tier, [layer * EXPERTS + i for i in ids])
        lease.batch()
        lease.end()


def test_recall_and_cost_count_what_verification_ran():
    forecast, tier, fetcher = make(slots=24)
    assert forecast.recall is None
    for _ in range(2):
        forecast.begin()
        route(forecast, [1, 2], [3, 4], [5, 6])
        forecast.drafted(1)
        route(forecast, [1, 3], [3, 4], [0, 6])
        forecast.drafted(0)
        forecast.end()
        verify(forecast, tier, fetcher, [1, 2, 7], [3, 4], [0, 5])
        cost = forecast.cost()
        assert cost.experts == 7 and cost.unions == (6, 8)
    assert forecast.recall == pytest.approx(6 / 7)
    verify(forecast, tier, fetcher, [1], [1], [1])  # a window in which nothing was drafted is no forecast
    cost = forecast.cost()
    assert (cost.experts, cost.unions) == (3, ())
    assert forecast.recall == pytest.approx(6 / 7)
    forecast.reset()
    assert forecast.recall is None


def test_a_new_window_forgets_the_last_one():
    forecast, tier, fetcher = make(slots=24)
    forecast.begin()
    route(forecast, [1, 2], [3, 4], [5, 6])
    forecast.drafted(1)
    forecast.end()  # stopped: never verified
    forecast.begin()
    route(forecast, [1, 2], [3, 4], [5, 6])
    forecast.drafted(0)
    forecast.end()
    verify(forecast, tier, fetcher, [1, 2], [3, 4], [5, 7])
    assert forecast.cost().unions == (6,)
    assert forecast.recall == pytest.approx(5 / 6)


@pytest.mark.parametrize("early", [True, False])
def test_by_itself_it_fetches_early_where_the_window_says_so(early):
    forecast, _, fetcher = make(slots=24)
    assert forecast.scheduling.fetch == "auto"
    forecast.begin(early)
    route(forecast, [1, 2], [3, 4], [5, 6])
    forecast.drafted(0)
    forecast.end()
    assert len(fetcher.queued()) == (6 if early else 0)
