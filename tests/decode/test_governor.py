"""The governor settles at depths that pay, in simulated time, and finds out when others pay instead."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from engine.config import MAX_DEPTH
from engine.decode.governor import Cost, Governor, Window

LAYERS, EXPERTS, TOP_K = 24, 64, 8
WINDOWS = 2000


@dataclass(frozen=True)
class World:
    """What windows take, in seconds, and what the draft is worth.

    alike: how much neighbouring tokens share their experts, from 0 (nothing) to 1 (all). easy: share of the tokens that the
    draft is sure of; sure, unsure: the odds it gives those and the others; honest: what of these odds comes true.
    """

    draft_s: float = 0.01
    layer_s: float = 0.05  # of verification: whatever its length
    expert_s: float = 0.0001  # to compute one
    fetch_s: float = 0.001
    missing: float = 0.5  # share of a window's experts that are fetched
    alike: float = 0.5
    easy: float = 0.8
    sure: float = 0.97
    unsure: float = 0.4
    honest: float = 1.0

    def union(self, positions: int) -> int:
        return min(LAYERS * EXPERTS, round(LAYERS * TOP_K * positions ** (1 - self.alike)))

    def seconds(self, drafts: int) -> tuple[float, float]:
        """(drafting, verification) of a window."""
        union = self.union(1 + drafts)
        compute = self.layer_s + union * self.expert_s
        return drafts * self.draft_s, max(compute, self.missing * union * self.fetch_s)

    @property
    def plain_s(self) -> float:
        """Seconds a token without drafting."""
        return sum(self.seconds(0))

    def best_s(self) -> float:
        """Seconds a token at the best of all fixed depths."""
        p = self.honest * (self.easy * self.sure + (1 - self.easy) * self.unsure)
        return min(sum(self.seconds(k)) / (1 + sum(p**i for i in range(1, k + 1))) for k in range(MAX_DEPTH + 1))


class Simulation:
    """Windows of a governor in a world; what they proposed, and the seconds and tokens they took."""

    def __init__(self, fixed: int | None = None, seed: int = 0) -> None:
        self.governor = Governor(fixed, LAYERS * EXPERTS)
        self.proposed: list[int] = []
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._random = random.Random(seed)

    def run(self, world: World, windows: int = WINDOWS, most: int = 1000) -> Simulation:
        for _ in range(windows):
            chance = self._random
            depth, odds = self.governor.depth(most), []
            assert 0 <= depth <= min(most, MAX_DEPTH)
            going = depth > 0
            while going:
                odds.append(world.sure if chance.random() < world.easy else world.unsure)
                going = len(odds) < depth and self.governor.go_on(len(odds), odds[-1])
            accepted = next((i for i, p in enumerate(odds) if chance.random() >= p * world.honest), len(odds))
            draft_s, verify_s = (s * chance.uniform(0.95, 1.05) for s in world.seconds(len(odds)))
            union = world.union(1 + len(odds))
            cost = Cost(union, world.missing * union, world.fetch_s, tuple(world.union(1 + i) for i in range(len(odds))))
            self.governor.learn(Window(len(odds), accepted, draft_s, verify_s), cost)
            self.proposed.append(len(odds))
            self.seconds.append(draft_s + verify_s)
            self.tokens.append(1 + accepted)
        return self

    def pace(self, last: int) -> float:
        """Seconds a token over the last windows."""
        return sum(self.seconds[-last:]) / sum(self.tokens[-last:])


# Fetching is what costs, and tokens that come together share what they fetch.
DEAR_LINK = World(fetch_s=0.004, missing=0.9)
DEAR_START = World(layer_s=1.0, expert_s=0.00001, fetch_s=0.0)  # verification takes as long for many as for one
NOT_ACCEPTED = replace(DEAR_LINK, honest=0.02)
NO_GAIN = World(draft_s=0.2, layer_s=0.1, expert_s=0.0005, fetch_s=0.0, missing=0.0)  # a draft costs what the target costs
SURE_AND_WRONG = replace(DEAR_LINK, easy=1.0, sure=0.99, honest=0.03)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("world", [DEAR_LINK, DEAR_START])
def test_where_drafting_pays_it_settles_at_deep_windows(world, seed):
    simulation = Simulation(seed=seed).run(world, 500)
    assert sum(simulation.proposed[-300:]) / 300 > 3
    assert simulation.pace(300) < 0.6 * world.plain_s
    assert simulation.pace(300) < 1.1 * world.best_s()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("world", [NOT_ACCEPTED, NO_GAIN, SURE_AND_WRONG])
def test_where_it_cannot_pay_it_settles_at_none_and_looks_elsewhere_seldom(world, seed):
    simulation = Simulation(seed=seed).run(world)
    assert sum(simulation.proposed[-500:]) / 500 < 0.25
    lost = sum(simulation.seconds) - sum(simulation.tokens) * world.plain_s
    assert lost < 0.03 * sum(simulation.seconds)


@pytest.mark.parametrize("world", [DEAR_LINK, DEAR_START, World(), World(easy=0.3), World(fetch_s=0.002)])
def test_it_is_never_much_slower_than_plain_decoding(world):
    assert Simulation().run(world, 300).pace(300) < 1.03 * world.plain_s


@pytest.mark.parametrize("seed", range(3))
def test_it_recovers_when_drafts_are_accepted_again(seed):
    simulation = Simulation(seed=seed).run(NOT_ACCEPTED).run(DEAR_LINK, 1200)
    assert simulation.pace(300) < 1.15 * DEAR_LINK.best_s()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", [NOT_ACCEPTED, NO_GAIN])
def test_it_gives_up_when_drafting_no_longer_pays(world, seed):
    """Because proposals are refused, or because everything has become resident and a draft as dear as the target."""
    simulation = Simulation(seed=seed).run(DEAR_LINK, 600).run(world, 1200)
    assert simulation.pace(300) < 1.05 * world.plain_s


@pytest.mark.parametrize("fixed", [0, 1, 5, MAX_DEPTH])
@pytest.mark.parametrize("world", [DEAR_LINK, NOT_ACCEPTED])
def test_a_fixed_depth_is_obeyed(fixed, world):
    simulation = Simulation(fixed).run(world, 50)
    assert set(simulation.proposed) == {fixed}
    assert Simulation(fixed).run(world, 5, most=2).proposed == [min(fixed, 2)] * 5


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_window_is_never_longer_than_what_may_still_be_said(most):
    simulation = Simulation().run(DEAR_LINK, 300, most)
    assert max(simulation.proposed) <= most
    assert set(simulation.run(DEAR_LINK, 200, MAX_DEPTH + 9).proposed) - {0, 1, 3}


def test_low_confidence_ends_a_window():
    """The same governor in the same state: it goes on after a token the draft is sure of, not after one that it is not."""
    governor = Simulation().run(replace(DEAR_LINK, easy=0.7, unsure=0.05), 400).governor
    longer = {}
    for confidence in (0.97, 0.05):
        while governor.depth(MAX_DEPTH) < MAX_DEPTH:  # not in a window that looks elsewhere
            governor.learn(Window(0, 0, 0.0, DEAR_LINK.plain_s), Cost(192, 96, DEAR_LINK.fetch_s, ()))
        longer[confidence] = governor.go_on(1, confidence)
    assert longer == {0.97: True, 0.05: False}


def test_windows_are_longer_where_the_draft_is_sure():
    sure, unsure = (Simulation().run(replace(DEAR_LINK, easy=easy), 400).proposed[-200:] for easy in (0.95, 0.3))
    assert sum(sure) > 1.5 * sum(unsure)


def test_the_present_depth_is_shown():
    governor = Governor(7, LAYERS * EXPERTS)
    assert governor.now == 7
    assert governor.depth(3) == governor.now == 3


@pytest.mark.parametrize("early", [True, False])
def test_fetching_early_goes_on_only_where_it_is_faster(early):
    governor = Governor(7, LAYERS * EXPERTS)
    ways = []
    for _ in range(200):
        ways.append(governor.early)
        governor.depth(7)
        governor.learn(Window(7, 3, 0.1, 0.2 if ways[-1] is early else 0.3), Cost(500, 250, 0.001, tuple(range(200, 270, 10))))
    assert ways[:5] == [True] * 5 and {True, False} == set(ways[:40])
    assert ways[40:60] == [early] * 20
