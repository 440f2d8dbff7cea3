"""The app over the real engine: a tiny random model is read from the disk, talked to, stopped, and given less memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import engine
from app import modes, panels
from app.desk import Desk
from app.history import History
from app.session import Replies, Tab
from engine.store.draft import build_draft
from engine.store.layout import read_info
from tests.edge0 import put_heads


@pytest.fixture
def desk(store: Callable[..., Path]) -> Iterator[Desk]:
    desk = Desk(engine, panels.Meter())
    ticket = desk.load(engine.EngineConfig(model=str(store("qwen3_moe")), expert_memory="50%", context=256))
    assert ticket.done.wait(60) and not ticket.error
    yield desk
    desk.close()


def talk(desk: Desk, tab: Tab, text: str, stop_after: int | None = None, **generation) -> str:
    """Say `text` and return the reply, stopped after so many updates if that is asked for."""
    replies = Replies(desk, pause=0.01)

    async def run() -> str:
        tab.say(text)
        updates = 0
        async for _ in replies.write(tab, "page", engine.GenerationConfig(**generation)):
            updates += bool(tab.conversation.messages[-1].content)
            if updates == stop_after:
                replies.stop("page")
        return tab.conversation.messages[-1].content

    return asyncio.run(run())


def test_figures_heat_map_and_kept_reply_are_the_engines(desk):
    tab = Tab(History(None))
    talk(desk, tab, "the experts", max_tokens=24, temperature=0)
    shown = panels.live(desk)
    assert (shown["phase"], shown["cells"]["rows"], shown["cells"]["columns"]) == ("ready", 3, 8)
    assert all(shown["figures"][name] != panels.DASH for name in ("tok_s", "ttft", "peak", "hit_rate", "rss"))
    reply = tab.history.load(tab.conversation.id).messages[-1]
    assert reply.finish in ("length", "stop") and reply.summary["tokens"] > 0
    assert desk.engine.stats().dropped == 0


def test_less_memory_changes_the_plan_and_not_the_words(desk):
    before = talk(desk, Tab(History(None)), "the disk", max_tokens=24, temperature=0)
    least = desk.engine.plan.min_expert_bytes
    change = desk.configure(expert_memory=least, prefetch="none")
    assert change.done.wait(30) and not change.error
    assert desk.engine.plan.expert_budget_bytes == least
    assert talk(desk, Tab(History(None)), "the disk", max_tokens=24, temperature=0) == before
    refused = desk.configure(expert_memory=1)
    assert refused.done.wait(30) and "minimum" in refused.error and desk.engine.plan.expert_budget_bytes == least


def test_a_model_without_heads_says_so_and_stays_in_its_mode(desk):
    assert desk.modes["on-demand"] is None and "no prerouter heads" in desk.modes["edge0"]
    change = desk.configure(mode=engine.Mode.EDGE0)
    assert change.done.wait(30) and "no prerouter heads" in change.error
    stats = desk.figures().stats
    assert (stats.mode, stats.routing, stats.lora) == ("on-demand", "router", False)
    assert "own router" in modes.quality(stats)


def test_with_heads_the_mode_changes_between_replies_and_the_figures_follow(desk, own_store):
    path = own_store("qwen3_moe")
    put_heads(path)
    assert desk.load(engine.EngineConfig(model=str(path), expert_memory="50%", context=256)).done.wait(60)
    assert desk.modes["on-demand"] is None and desk.modes["edge0"] is None
    before = talk(desk, Tab(History(None)), "the disk", max_tokens=24, temperature=0)
    change = desk.configure(mode=engine.Mode.EDGE0)
    assert change.done.wait(30) and not change.error
    tab = Tab(History(None))
    talk(desk, tab, "the disk", max_tokens=24, temperature=0, repetition_penalty=0.5)
    assert panels.live(desk)["figures"]["agreement"] != panels.DASH
    assert tab.conversation.messages[-1].summary["line"].endswith("Edge0 without LoRA")
    assert "prerouter routing" in modes.quality(desk.figures().stats)
    assert desk.configure(mode=engine.Mode.ON_DEMAND).done.wait(30)
    assert talk(desk, Tab(History(None)), "the disk", max_tokens=24, temperature=0) == before


def test_with_a_draft_specters_panel_is_the_engines(desk, own_store):
    path = own_store("qwen3_moe")
    build_draft(path, read_info(path), bits=4)
    assert desk.load(engine.EngineConfig(model=str(path), expert_memory="75%", context=256)).done.wait(60)
    assert desk.modes["specter"] is None and panels.live(desk)["draft"] is None
    change = desk.configure(mode=engine.Mode.SPECTER, depth=2)
    assert change.done.wait(30) and not change.error
    assert 0 < desk.engine.plan.draft_bytes < desk.engine.plan.expert_budget_bytes
    tab = Tab(History(None))
    talk(desk, tab, "the disk", max_tokens=24, temperature=0, repetition_penalty=0.5)
    draft = panels.live(desk)["draft"]
    assert panels.DASH not in draft["figures"].values() and len(draft["positions"]) == 2
    assert sum(draft["accepted"]) == pytest.approx(1, abs=0.01) and sum(draft["split"]) == pytest.approx(1, abs=0.01)
    assert tab.conversation.messages[-1].summary["line"].endswith("Specter with a 4-bit draft")
    refused = desk.configure(draft_bits=2)
    assert refused.done.wait(30) and "2-bit draft" in refused.error
    assert desk.configure(mode=engine.Mode.ON_DEMAND).done.wait(30) and panels.live(desk)["draft"] is None


def test_stop_reaches_the_engine_within_a_token(desk):
    tab = Tab(History(None))
    # a tiny model may end by itself; the repetition penalty below 1 keeps it going
    talk(desk, tab, "the model", stop_after=2, max_tokens=180, temperature=0, repetition_penalty=0.5)
    end = time.monotonic() + 5
    while desk.turn is not None:
        assert time.monotonic() < end
    assert tab.history.load(tab.conversation.id).messages[-1].finish == "stopped"
    assert desk.engine.stats().completion_tokens < 180


def test_a_conversation_longer_than_the_context_is_refused_readably(desk):
    turn = desk.reply([{"role": "user", "content": "read " * 400}], engine.GenerationConfig(), lambda turn: None)
    assert turn.done.wait(30) and "context" in turn.error
