"""Items are reproducible, distinct, and give nothing away by the place of their answer."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.errors import ConfigError
from engine.eval.choice_sets import SETS, make_items
from engine.eval.choice_words import CAPITALS, CATEGORIES, OBJECTS, OPPOSITES, entries, pairs


@pytest.mark.parametrize("name", SETS)
def test_the_same_seed_gives_the_same_items(name):
    items = make_items(name, 200, seed=3)
    assert make_items(name, 200, seed=3) == items
    assert make_items(name, 60, seed=3) == items[:60]
    assert make_items(name, 200, seed=4) != items


@pytest.mark.parametrize("name", SETS)
def test_no_item_and_no_option_is_repeated(name):
    items = make_items(name, 200, seed=0)
    assert len({item.options[item.answer] for item in items}) == 200
    for item in items:
        assert len(set(item.options)) == len(item.options)


@pytest.mark.parametrize("name", SETS)
def test_the_place_of_the_answer_says_nothing(name):
    items = make_items(name, 200, seed=0)
    [count] = {len(item.options) for item in items}
    places = Counter(item.answer for item in items)
    assert max(places.values()) - min(places[place] for place in range(count)) <= 1
    answers = [item.answer for item in items]
    assert len({tuple(answers[i : i + count]) for i in range(0, 200 - count, count)}) > 1


@pytest.mark.parametrize("name", SETS)
def test_options_differ_in_their_ending_alone(name):
    """What comes before is decoded, so that a mode that only changes decoding is seen."""
    for item in make_items(name, 50, seed=0):
        words = [option.split() for option in item.options]
        shared = next(i for i, column in enumerate(zip(*words)) if len(set(column)) > 1)
        assert shared >= 3
        assert all(len(option) - shared <= 2 for option in words)


def test_the_words_leave_one_right_answer():
    kinds = [word for text in CATEGORIES.values() for word in entries(text)]
    assert len(set(kinds)) == len(kinds)
    things = [word for text in OBJECTS.values() for word in entries(text)]
    assert len(set(things)) == len(things)
    countries = [form for text in CAPITALS.values() for pair in pairs(text) for form in pair]
    assert len(set(countries)) == len(countries)
    for text in OPPOSITES.values():
        words = [form for pair in pairs(text) for form in pair]
        assert len(set(words)) == len(words)


def test_too_many_items_are_refused():
    with pytest.raises(ConfigError, match="the set 'categories' has no 5000 distinct items: ask for at most"):
        make_items("categories", 5000, seed=0)


def test_an_unknown_set_is_named():
    with pytest.raises(ConfigError, match="no choice set 'riddles': choose from determiner-noun"):
        make_items("riddles", 1, seed=0)
