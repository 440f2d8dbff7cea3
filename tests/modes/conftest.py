"""Fixtures of the modes' tests: engines in Specter mode beside those that decode plainly."""

from __future__ import annotations

from functools import cache

import pytest

from engine import Mode
from tests.specter import BAD, FAIR, GOOD, drafted_copy, memory, spoil_draft
from tests.streaming import open_engine


@pytest.fixture(scope="session")
def drafted(store, tmp_path_factory):
    """drafted(kind, experts) -> a store with a good, a fair and a bad draft, not to be changed."""

    @cache
    def make(kind: str = "qwen2_moe", experts: str = "bf16"):
        directory = drafted_copy(store(kind, experts), tmp_path_factory.mktemp("drafted") / kind, GOOD, FAIR, BAD)
        spoil_draft(directory, BAD)
        return directory

    return make


@pytest.fixture(scope="module")
def plain(store):
    """plain(kind) -> an engine on demand with all experts resident."""
    opened = {}

    def make(kind: str = "qwen2_moe", experts: str = "bf16"):
        key = kind, experts
        if key not in opened:
            opened[key] = open_engine(store(kind, experts), None)
        opened[key].reset()
        return opened[key]

    yield make
    for engine in opened.values():
        engine.close()


@pytest.fixture
def specter():
    """specter(directory, slots, depth, bits, ...) -> an engine in Specter mode with so many slots beside its draft."""
    opened = []

    def make(directory, slots: int | None = None, depth: str | int = 3, bits: int = GOOD, **settings):
        engine = open_engine(directory, None, mode=Mode.ON_DEMAND, **settings)
        opened.append(engine)
        engine.configure(mode=Mode.SPECTER, depth=depth, draft_bits=bits, expert_memory=memory(directory, slots, bits))
        return engine

    yield make
    for engine in opened:
        engine.close()
