"""A run compares every arm with one reference on the same token ids; an arm that cannot be opened stops it at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from engine.eval.arms import Arm, open_arm
from engine.eval.choice_sets import Item
from engine.eval.scoring import ChatScore, ChoiceScore, Force, Turn, choose, record, score_chats, score_choices

Ids = tuple[list[int], list[list[int]]]  # of an item's prompt and of its options
Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]  # of so many steps -> done()


@dataclass(frozen=True)
class Material:
    """What is scored: chats, and sets of items by name with their token ids."""

    chats: list[list[Turn]]
    sets: dict[str, list[Item]]
    ids: dict[str, list[Ids]]


@dataclass(frozen=True)
class ArmScore:
    label: str
    chats: ChatScore
    choices: list[ChoiceScore]


@dataclass(frozen=True)
class Reference:
    """What the reference chose in each set, and where `record` kept its log-probabilities."""

    name: str
    records: Path
    chosen: dict[str, list[int]]


def encode(tokenizer, item: Item) -> Ids:
    """The question as a chat, ready for the reply; without a chat template as a line of text."""
    plain = tokenizer.chat_template is None
    message = [{"role": "user", "content": item.question}]
    text = item.question + "\n" if plain else tokenizer.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    )  # fmt: skip
    prompt = tokenizer.encode(text, add_special_tokens=plain)  # a template writes its special tokens itself
    return prompt, [tokenizer.encode(option, add_special_tokens=False) for option in item.options]


def make_material(tokenizer, chats: list[list[Turn]], sets: dict[str, list[Item]]) -> Material:
    return Material(chats, sets, {name: [encode(tokenizer, item) for item in items] for name, items in sets.items()})


def refer(name: str, force: Force, material: Material, work: Path, bar: Bar) -> Reference:
    """Put everything through the reference, whose log-probabilities are kept in `work`."""
    records = work / "reference"
    records.mkdir()
    with bar("reference: chats", len(material.chats)) as done:
        record(force, material.chats, records, done)
    return Reference(name, records, _choose_all(force, material, "reference", bar))


def evaluate(reference: Reference, arms: Sequence[Arm], material: Material, bar: Bar) -> list[ArmScore]:
    """Scores of all arms, one after another."""
    return [_score(arm, reference, material, bar) for arm in arms]


def _score(arm: Arm, reference: Reference, material: Material, bar: Bar) -> ArmScore:
    with open_arm(arm) as engine:
        with bar(f"{arm.label}: chats", len(material.chats)) as done:
            chats = score_chats(engine.force, material.chats, reference.records, done)
        chosen = _choose_all(engine.force, material, arm.label, bar)
    choices = [score_choices(n, items, chosen[n], reference.chosen[n]) for n, items in material.sets.items()]
    return ArmScore(arm.label, chats, choices)


def _choose_all(force: Force, material: Material, label: str, bar: Bar) -> dict[str, list[int]]:
    chosen = {}
    for name, ids in material.ids.items():
        with bar(f"{label}: {name}", len(ids)) as done:
            chosen[name] = choose(force, ids, done)
    return chosen
