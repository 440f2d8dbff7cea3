"""The faster way of decoding stays, the draft's memory with it or without; what was not measured is not believed."""

from __future__ import annotations

import pytest

from engine.decode.parking import Parking

TOKENS = 60


def settle(parking: Parking, drafting: float, without: float, replies: int, tokens: int = TOKENS) -> list[bool]:
    """What is decided after each of so many replies that take `drafting` or `without` seconds a token."""
    return [parking.decide(tokens * (without if parking.parked else drafting), tokens) for _ in range(replies)]


@pytest.mark.parametrize(("drafting", "without", "parked"), [(1.0, 2.0, False), (2.0, 1.0, True)])
def test_both_ways_are_measured_and_the_faster_one_stays(drafting, without, parked):
    decisions = settle(Parking(allowed=True), drafting, without, 12)
    assert decisions[:2] == [True, False]  # the way that is not known yet, and the draft again, now that it has learnt
    assert decisions[2:7] == [parked] * 5


def test_what_a_draft_took_while_it_learnt_is_not_held_against_it():
    parking = Parking(allowed=True)
    assert parking.decide(TOKENS * 9.0, TOKENS) is True
    assert settle(parking, 1.0, 2.0, 6) == [False] * 6


def test_nor_is_a_second_visit_that_was_unlucky():
    parking = Parking(allowed=True)
    settle(parking, 1.0, 2.0, 2)
    assert parking.decide(TOKENS * 3.0, TOKENS) is False
    assert settle(parking, 1.0, 2.0, 3) == [False] * 3


def test_the_slower_way_is_looked_at_again_and_seldom():
    decisions = settle(Parking(allowed=True), 2.0, 1.0, 300)
    assert 0 < decisions.count(False) < 15


def test_it_follows_when_conditions_change():
    parking = Parking(allowed=True)
    settle(parking, 2.0, 1.0, 5)
    assert parking.parked
    assert settle(parking, 1.0, 9.0, 8)[-1] is False


def test_short_replies_are_added_up_before_they_are_believed():
    decisions = settle(Parking(allowed=True), 2.0, 1.0, 30, tokens=9)
    assert decisions[:5] == [False] * 5
    assert decisions[5:11] == [True] * 6
    assert decisions[11:17] == [False] * 6
    assert decisions[17:] == [True] * 13


def test_one_odd_reply_decides_nothing():
    parking = Parking(allowed=True)
    settle(parking, 1.0, 1.5, 12)
    assert parking.decide(TOKENS * 2.0, TOKENS) is False


def test_where_parking_is_not_allowed_the_draft_stays():
    assert settle(Parking(allowed=False), 9.0, 1.0, 5) == [False] * 5
