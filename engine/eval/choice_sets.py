"""Every item is a pure function of its set's name, the seed and its index: no repeats, every place as often right.

A set is a family of sentences whose end tells right from wrong. The options are whole replies that differ in their last
word, so that most of what decides is computed in decode forwards, and one forced reply often serves all options.
Nothing is downloaded: the words are in choice_words.py. The families were chosen by what the default model's dense teacher
scores on them: clearly above chance, below the ceiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engine.errors import ConfigError
from engine.eval.choice_words import (
    ADJECTIVES,
    CAPITALS,
    CATEGORIES,
    NAMES,
    OBJECTS,
    OPPOSITES,
    THINGS,
    entries,
    pairs,
)

_PATIENCE = 1000  # draws in a row that bring no new item: the set is exhausted


@dataclass(frozen=True)
class Item:
    """`question` is the user's message; `options` are replies, of which `options[answer]` is right."""

    question: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Draft:
    """An item before its answer is given a place; `endings[0]` is right, the others are in random order."""

    question: str
    beginning: str
    endings: tuple[str, ...]


def determiner_noun(rng: Random) -> Draft:
    """Number agreement over two adjectives: Helen found these old wooden clocks | clock."""
    number = rng.randrange(2)
    determiner = rng.choice((("this", "these"), ("that", "those")))[number]
    thing = rng.choice(pairs(THINGS))
    verb = rng.choice(("bought", "looked at", "found", "sold", "liked", "took"))
    first, second = rng.sample(entries(ADJECTIVES), 2)
    beginning = f"{rng.choice(entries(NAMES))} {verb} {determiner} {first} {second}"
    return Draft("Write one sentence.", beginning, (thing[number], thing[1 - number]))


def geography(rng: Random) -> Draft:
    """The country of a capital, among four of its continent, or the continent of a country."""
    continents = rng.sample(list(CAPITALS), len(CAPITALS))
    chosen = rng.sample(pairs(CAPITALS[continents[0]]), 4)
    country, capital = chosen[0]
    beginning, endings = rng.choice((
        (f"{capital} is the capital of", [country for country, _ in chosen]),
        (f"{country} is a country on the continent of", continents),
    ))  # fmt: skip
    return Draft("Tell me a fact about geography.", beginning, tuple(endings))


def categories(rng: Random) -> Draft:
    """What a thing is a kind of, among eight kinds."""
    kinds = rng.sample(list(CATEGORIES), 8)
    word = rng.choice(entries(CATEGORIES[kinds[0]]))
    return Draft("Tell me a simple fact.", f"{word[0].upper()}{word[1:]} is a type of", tuple(kinds))


def opposites(rng: Random) -> Draft:
    """The opposite of a word, among eight of its part of speech."""
    chosen = rng.sample(pairs(OPPOSITES[rng.choice(list(OPPOSITES))]), 8)
    turned = [pair[:: rng.choice((1, -1))] for pair in chosen]
    return Draft("What do you know about opposites?", f"The opposite of {turned[0][0]} is", tuple(w for _, w in turned))


def objects(rng: Random) -> Draft:
    """What one does a thing to, among six things: At home Anna drank the tea | coat | lie | ladder ..."""
    verbs = rng.sample(list(OBJECTS), 6)
    when = rng.choice(("Yesterday", "Last night", "On Sunday", "In the end", "At home", "This morning"))
    beginning = f"{when} {rng.choice(entries(NAMES))} {verbs[0]} the"
    return Draft("Write one sentence.", beginning, tuple(rng.choice(entries(OBJECTS[verb])) for verb in verbs))


def progressions(rng: Random) -> Draft:
    """The next number of an arithmetic progression, among four with the same first digits."""
    step, first = rng.randint(2, 9), rng.randint(2, 80)
    shown = [first + i * step for i in range(4)]
    right = shown[-1] + step
    wrong = rng.sample([right - right % 10 + digit for digit in range(10) if digit != right % 10], 3)
    return Draft(f"Count up in steps of {step}.", ", ".join(map(str, shown)) + ",", (str(right), *map(str, wrong)))


SETS: dict[str, Callable[[Random], Draft]] = {
    "determiner-noun": determiner_noun,
    "geography": geography,
    "categories": categories,
    "opposites": opposites,
    "objects": objects,
    "progressions": progressions,
}


def make_items(name: str, count: int, seed: int) -> list[Item]:
    """The first `count` items of the set `name`. The list for a greater count begins with that for a smaller one.

    Raises ConfigError when the set is unknown or has fewer distinct items.
    """
    if name not in SETS:
        raise ConfigError(f"no choice set '{name}': choose from {', '.join(SETS)}")
    rng, items, seen, misses, places = Random(f"{name} {seed}"), [], set(), 0, []
    while len(items) < count:
        draft = SETS[name](rng)
        right = f"{draft.beginning} {draft.endings[0]}"
        misses = misses + 1 if right in seen else 0
        if misses > _PATIENCE:
            raise ConfigError(f"the set '{name}' has no {count} distinct items: ask for at most {len(items)} with "
                              "--items")  # fmt: skip
        if right in seen:
            continue
        seen.add(right)
        if not places:  # dealt like cards: over every few items the answer has each place once
            places = rng.sample(range(len(draft.endings)), len(draft.endings))
        options, place = [f"{draft.beginning} {ending}" for ending in draft.endings[1:]], places.pop()
        options.insert(place, right)
        items.append(Item(draft.question, tuple(options), place))
    return items
