"""A control shows what is in force, is left in the hand that moves it, and no other page's hand gets in its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from fake_engine import MIB, FakeBackend

from app.controls import Panel
from app.desk import Desk
from app.history import Archive
from app.models import Preparing
from app.panels import Meter
from app.wiring import Wiring


def test_a_slider_is_told_only_what_changed_and_what_it_does_not_show():
    panel = Panel()
    assert panel.to_tell(48, 0, asked=False) == {"value": 48}
    assert panel.to_tell(48, 30, asked=False) == {}  # a person moved it, and the engine has not heard of it yet
    assert panel.to_tell(30, 30, asked=False) == {}
    assert panel.to_tell(16, 30, asked=False) == {"value": 16}  # changed on another page
    assert panel.to_tell(48, 20, asked=True) == {}
    panel.move()
    assert panel.to_tell(48, 20, asked=False) == {}
    panel.rests = 0.0
    assert panel.to_tell(48, 20, asked=False) == {"value": 48}


def test_a_refused_budget_puts_the_slider_back():
    panel = Panel()
    panel.to_tell(48, 0, asked=False)
    panel.memory = None  # as when a budget is asked for
    assert panel.to_tell(48, 90, asked=False) == {"value": 48}


@pytest.fixture
def wiring(backend: FakeBackend) -> Iterator[Wiring]:
    desk = Desk(backend, Meter())
    assert desk.load(backend.EngineConfig()).done.wait(5)
    yield Wiring(backend, desk, Archive(None, "guest"), Preparing(backend), page=None)
    desk.close()


async def through(handler: AsyncIterator) -> None:
    async for _ in handler:
        pass


def test_the_echo_of_a_change_on_another_page_does_not_swallow_the_next_one(wiring):
    async def slide() -> None:
        mine, other = Panel(), Panel()
        moves = (35, mine), (40, mine), (48, other)  # the last only shows what is in force
        await asyncio.gather(*(through(wiring.slide_memory(*move)) for move in moves))

    asyncio.run(slide())
    assert wiring.desk.engine.plan.expert_budget_bytes == 40 * MIB


def test_another_model_starts_in_the_mode_that_every_model_has(wiring):
    modes = wiring.backend.Mode
    assert wiring.desk.configure(mode=modes.EDGE0, lora=False).done.wait(5)
    asyncio.run(through(wiring.load("default", 2048)))
    config = wiring.desk.engine.config
    assert (config.context, config.mode, config.lora) == (2048, modes.EDGE0, False)
    asyncio.run(through(wiring.load("smolmoe-int4", 2048)))
    config = wiring.desk.engine.config
    assert (config.model, config.mode, config.lora) == ("smolmoe-int4", modes.ON_DEMAND, False)
