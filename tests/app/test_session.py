"""Turns: what reaches the engine, what is shown, and what is kept however a reply ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fake_engine import FakeBackend, split_reasoning

from app.controls import generation_config
from app.desk import Desk
from app.history import History, Message
from app.panels import Meter
from app.render import chat_messages, day_of, listing_html, notice_html
from app.session import Replies, ReplyError, Tab, request_messages, turn_of


@pytest.fixture
def replies(backend: FakeBackend) -> Iterator[Replies]:
    desk = Desk(backend, Meter())
    assert desk.load(backend.EngineConfig()).done.wait(5)
    yield Replies(desk, pause=0.01)
    desk.close()


@pytest.fixture
def tab() -> Tab:
    return Tab(History(None))


async def write(replies: Replies, tab: Tab, page: str = "page", stop_after: int | None = None) -> list[str]:
    """Reply, and return the reply's text at each update; stop after so many updates that have text."""
    seen = []
    async for _ in replies.write(tab, page, replies.desk.backend.GenerationConfig()):
        seen.append(tab.conversation.messages[-1].content)
        if stop_after is not None and sum(map(bool, seen)) == stop_after:
            replies.stop(page)
    return seen


def test_a_reply_streams_and_is_kept_with_its_figures(replies, tab):
    tab.say("Explain")
    seen = asyncio.run(write(replies, tab))
    assert len(set(seen)) > 5 and all(after.startswith(before) for before, after in zip(seen, seen[1:], strict=False))
    kept = tab.history.load(tab.conversation.id).messages
    assert [m.role for m in kept] == ["user", "assistant"] and kept[1].content == seen[-1]
    assert kept[1].finish == "stop" and "tok/s" in kept[1].summary["line"]
    assert tab.writing is None and tab.conversation.title == "Explain"


def test_what_the_person_said_is_kept_before_the_reply(replies, tab):
    tab.say("Kept")
    assert tab.history.load(tab.conversation.id).messages[0].content == "Kept"


def test_stop_keeps_what_was_written(replies, tab):
    tab.say("long")
    asyncio.run(write(replies, tab, stop_after=3))
    reply = tab.history.load(tab.conversation.id).messages[-1]
    assert reply.finish == "stopped" and reply.content and len(replies.desk.backend.stopped) == 1


def test_an_error_keeps_the_part_and_says_why(replies, tab):
    tab.say("broken")
    with pytest.raises(ReplyError, match="reading experts.bin failed"):
        asyncio.run(write(replies, tab))
    reply = tab.history.load(tab.conversation.id).messages[-1]
    assert reply.role == "assistant" and reply.finish == "error" and reply.content


def test_a_page_that_goes_away_ends_its_reply_even_if_nobody_iterates(replies, tab):
    async def leave() -> None:
        tab.say("long")
        writing = replies.write(tab, "page", replies.desk.backend.GenerationConfig())
        while not tab.conversation.messages[-1].content or tab.conversation.messages[-1].role == "user":
            await anext(writing)
        replies.stop("page")  # what the unload event does
        await replies.settled(tab.conversation.id)
        kept = tab.history.load(tab.conversation.id).messages[-1]
        assert kept.finish == "stopped" and kept.content
        await writing.aclose()

    asyncio.run(leave())
    assert len(replies.desk.backend.stopped) == 1 and replies.desk.turn is None


def test_closing_the_generator_ends_the_reply(replies, tab):
    async def leave() -> None:
        tab.say("long")
        writing = replies.write(tab, "page", replies.desk.backend.GenerationConfig())
        await anext(writing)
        await writing.aclose()
        await replies.settled(tab.conversation.id)

    asyncio.run(leave())
    assert replies.desk.turn is None and replies.desk.waiting == 0


def test_two_pages_take_turns_and_keep_to_themselves(replies):
    tabs = [Tab(History(None)), Tab(History(None))]

    async def both() -> None:
        for tab, text in zip(tabs, ("short", "short template"), strict=True):
            tab.say(text)
        await asyncio.gather(*(write(replies, tab, f"page {i}") for i, tab in enumerate(tabs)))

    asyncio.run(both())
    assert [tab.conversation.messages[-1].content for tab in tabs] == ["A short answer. ", "<think>\nA short answer. "]
    assert [[m.content for m in tab.conversation.messages if m.role == "user"] for tab in tabs] == [
        ["short"], ["short template"]]  # fmt: skip


def test_a_waiting_reply_shows_its_place_and_leaves_no_trace_when_withdrawn(replies):
    first, second = Tab(History(None)), Tab(History(None))

    async def run() -> list[str]:
        first.say("long")
        running = asyncio.create_task(write(replies, first, "first", stop_after=8))
        await asyncio.sleep(0.05)
        second.say("short")
        lines = []
        async for line in replies.write(second, "second", replies.desk.backend.GenerationConfig()):
            lines.append(line)
            replies.stop("second")
        await running
        return lines

    assert asyncio.run(run())[0] == "Waiting, position 1"
    assert [m.role for m in second.conversation.messages] == ["user"]
    assert [m.role for m in second.history.load(second.conversation.id).messages] == ["user"]


def test_the_request_has_the_system_prompt_first_and_no_empty_turns(tab):
    tab.new("  ")
    tab.say("one")
    assert request_messages(tab.conversation) == [{"role": "user", "content": "one"}]
    tab.conversation.system = "Be kind."
    tab.conversation.messages.append(Message("assistant", ""))
    assert [m["role"] for m in request_messages(tab.conversation)] == ["system", "user"]


def test_taking_back_a_turn_drops_what_followed(tab):
    tab.say("first")
    tab.conversation.messages.append(Message("assistant", "<think>a</think>b", finish="stop"))
    tab.say("second")
    tab.conversation.messages.append(Message("assistant", "c", {"line": "1 tokens"}, "stop"))
    shown, turns = chat_messages(tab.conversation, split_reasoning)
    assert turns == [0, 1, 1, 2, 3, 3] and len(shown) == 6
    assert turn_of(tab, split_reasoning, 4) == 3 and turn_of(tab, split_reasoning, (5, 0)) == 3
    assert tab.take_back(3) == "second"
    assert [m.content for m in tab.conversation.messages] == ["first", "<think>a</think>b"]
    assert tab.take_back(0) == "first" and tab.conversation.messages == []


def test_what_is_shown_is_the_text_itself_with_reasoning_apart(tab):
    tab.say("  two\n    lines")
    reply = Message("assistant", "<think>why</think>\n\n    code", {"line": "5 tokens"}, "length")
    tab.conversation.messages.append(reply)
    shown, _ = chat_messages(tab.conversation, split_reasoning)
    assert shown[0]["content"][0]["text"] == "  two\n    lines"
    assert shown[1]["content"][0]["text"] == "why" and shown[1]["metadata"]["status"] == "done"
    assert shown[3]["metadata"]["title"] == "token limit reached · 5 tokens"
    tab.conversation.messages[-1] = Message("assistant", "")
    assert "or-wait" in chat_messages(tab.conversation, split_reasoning, "Waiting <1>")[0][-1]["content"][0]["text"]
    assert "&lt;1&gt;" in chat_messages(tab.conversation, split_reasoning, "Waiting <1>")[0][-1]["content"][0]["text"]
    tab.conversation.messages[-1] = Message("assistant", "<think>still")
    assert chat_messages(tab.conversation, split_reasoning)[0][-1]["metadata"]["title"] == "Thinking…"


def test_opening_the_conversation_being_written_shows_the_live_one(replies, tab):
    async def run() -> None:
        tab.say("long")
        writing = replies.write(tab, "page", replies.desk.backend.GenerationConfig())
        await anext(writing)
        live = tab.conversation
        tab.new("")
        assert tab.open(live.id) and tab.conversation is live
        await writing.aclose()

    asyncio.run(run())
    assert not tab.open("gone")


def test_settings_become_a_generation_config_or_a_readable_refusal(backend):
    made = generation_config(backend, 0.5, 40.0, 0.9, 0.05, 1.1, 100.0, " 7 ", "END\n\nSTOP")
    assert made == backend.GenerationConfig(100, 0.5, 40, 0.9, 0.05, 1.1, 7, ("END", "STOP"))
    assert generation_config(backend, 0, 0, 1, 0, 1, 1, "", "").seed is None
    for bad in ("x", "1.5", "-2"):
        with pytest.raises(backend.ConfigError, match="seed"):
            generation_config(backend, 0, 0, 1, 0, 1, 1, bad, "")
    with pytest.raises(backend.ConfigError, match="max tokens"):
        generation_config(backend, 0, 0, 1, 0, 1, None, "", "")


def test_titles_and_errors_are_shown_as_text_not_as_markup(tab):
    tab.say("<img src=x onerror=alert(1)>")
    listing = listing_html(tab.history.entries(), tab.conversation.id)
    assert "<img" not in listing and "&lt;img" in listing and "aria-current" in listing
    assert "<b>" not in notice_html("<b>no</b>") and notice_html("") == ""


def test_conversations_are_grouped_by_local_days():
    import time

    noon = time.mktime((2026, 3, 10, 12, 0, 0, 0, 0, -1))
    hours = [(1, "Today"), (13, "Yesterday"), (37, "This week"), (24 * 8, "Earlier")]
    assert [day_of(noon - 3600 * ago, noon) for ago, _ in hours] == [name for _, name in hours]
