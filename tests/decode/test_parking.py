"""The faster way of decoding stays, the draft's memory with it or without; what was not measured is not believed."""

from __future__ import annotations

import pytest

from engine.decode.parking import Parking, pace


def settle(parking: Parking, drafting: float, without: float, replies: int) -> list[bool]:
    """What is decided after each of so many replies that take `drafting` or `without` seconds a token."""
    return [parking.decide(without if parking.parked else drafting) for _ in range(replies)]


@pytest.mark.parametrize(("drafting", "without", "parked"), [(1.0, 2.0, False), (2.0, 1.0, True)])
def test_both_ways_are_measured_and_the_faster_one_stays(drafting, without, parked):
    decisions = settle(Parking(allowed=True), drafting, without, 12)
    assert decisions[0] is True  # the way that is not known yet
    assert decisions[2:] == [parked] * 10


def test_the_slower_way_is_looked_at_again_and_seldom():
    decisions = settle(Parking(allowed=True), 2.0, 1.0, 300)
    assert 0 < decisions.count(False) < 12


def test_it_follows_when_conditions_change():
    parking = Parking(allowed=True)
    settle(parking, 2.0, 1.0, 10)
    assert parking.parked
    assert settle(parking, 1.0, 9.0, 4)[-1] is False


def test_a_draft_stays_while_its_speed_is_not_known_and_where_parking_is_not_allowed():
    assert Parking(allowed=True).decide(None) is False
    assert settle(Parking(allowed=False), 9.0, 1.0, 5) == [False] * 5


def test_pace_is_the_time_between_tokens_of_a_reply_that_is_long_enough():
    assert pace(100, 105, 11) is None
    assert pace(100, 105.5, 12) == pytest.approx(0.5)
