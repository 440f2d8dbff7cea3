"""A tab owns one conversation and at most one reply in the making; what it shows is always its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from app.desk import Desk, Turn
from app.history import Conversation, History, Message
from app.panels import summarise
from app.render import chat_messages

SHARE_OF_TIME = 0.03  # of the wall time, the most that showing the text may take


class Tab:
    """The state of one page. Its reply goes on while another of its conversations is looked at."""

    def __init__(self, history: History, owns_history: bool = False) -> None:
        self.history = history
        self.conversation = Conversation()
        self.writing: tuple[Turn, Conversation] | None = None
        self._owns_history = owns_history

    def __deepcopy__(self, memo: dict) -> Tab:
        return self  # it is the page's own object wherever it is passed

    def open(self, id: str) -> bool:
        """Show the conversation `id`, the live one when its reply is still being written. False when it is gone."""
        if self.writing and self.writing[1].id == id:
            self.conversation = self.writing[1]
            return True
        found = self.history.load(id)
        if found:
            self.conversation = found
        return found is not None

    def new(self, system: str) -> None:
        self.conversation = Conversation(system=system)

    def say(self, text: str) -> None:
        """Add what the person said, and keep it before anything can go wrong."""
        if not self.conversation.messages:
            self.conversation.name_after(text)
        self.conversation.messages.append(Message("user", text))
        self.history.save(self.conversation)

    def take_back(self, index: int) -> str:
        """Drop the turns from the user's turn `index`, or the one before it, on; returns what the user had said."""
        messages = self.conversation.messages
        while index > 0 and messages[index].role != "user":
            index -= 1
        text = messages[index].content
        del messages[index:]
        return text

    def close(self) -> None:
        if self._owns_history:
            self.history.close()


def request_messages(conversation: Conversation) -> list[dict]:
    """The engine's input: the system prompt, if any, and the turns that hold text."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system.strip() else []
    return system + [{"role": m.role, "content": m.content} for m in conversation.messages if m.content]


class Replies:
    """Makes replies for tabs, and knows which page each belongs to, so that closing the page ends its reply."""

    def __init__(self, desk: Desk, pause: float = 0.2) -> None:
        self.desk = desk
        self._pause = pause
        self._of_page: dict[str, tuple[Turn, Conversation]] = {}

    def stop(self, page: str) -> None:
        """End the reply of `page` (a session hash), whether it is written or waits. Nothing happens without one."""
        turn, _ = self._of_page.get(page, (None, None))
        if turn is not None:
            self.desk.stop(turn)

    async def settled(self, id: str, seconds: float = 2.0) -> None:
        """Wait until no reply to the conversation `id` is being made, `seconds` at most: a page that is loaded again
        asks for its conversation while its old self is still being ended."""
        end = time.monotonic() + seconds
        while any(c.id == id for _, c in list(self._of_page.values())) and time.monotonic() < end:
            await asyncio.sleep(0.05)

    async def write(self, tab: Tab, page: str, generation: Any) -> AsyncIterator[str]:
        """Reply to the tab's conversation. Yields the waiting line (empty once there is text) whenever there is
        something new to show. The conversation is saved by the time the reply has ended, whether or not anyone still
        iterates; closing this generator ends the reply. Raises ReplyError with the engine's error after the last text.
        """
        conversation, message = tab.conversation, Message("assistant", "")
        messages = request_messages(conversation)

        def end(turn: Turn) -> None:
            tab.writing = None
            try:
                settle(tab.history, conversation, message, turn)
            finally:
                self._of_page.pop(page, None)

        conversation.messages.append(message)
        turn = self.desk.reply(messages, generation, end)
        tab.writing = (turn, conversation)
        self._of_page[page] = (turn, conversation)
        if turn.done.is_set():  # it ended before it was noted down
            tab.writing = None
            self._of_page.pop(page, None)
        try:
            async for line in self._follow(turn):
                message.content = turn.text
                yield line
        finally:
            self.desk.stop(turn)
        if turn.error:
            raise ReplyError(turn.error)

    async def _follow(self, turn: Turn) -> AsyncIterator[str]:
        shown, due = "", 0.0
        while not turn.done.is_set():
            line = self._waiting_line(turn)
            begin = time.perf_counter()
            if begin >= due and turn.text + line != shown:
                shown = turn.text + line
                yield line
                # Showing the text takes time from making it: the slower it is shown, the more seldom.
                now = time.perf_counter()
                due = now + min((now - begin) / SHARE_OF_TIME, 5 * self._pause)
            await asyncio.sleep(self._pause)
        yield ""

    def _waiting_line(self, turn: Turn) -> str:
        place = self.desk.position(turn)
        if turn.text:
            return ""
        if place:
            reason = self.desk.status.detail if self.desk.status.phase == "loading" else ""
            return f"Waiting, position {place}" + (f" ({reason})" if reason else "")
        return "Reading the prompt…"


def settle(history: History, conversation: Conversation, message: Message, turn: Turn) -> None:
    """Leave the conversation as it will be kept: an empty reply that was not finished is no reply."""
    message.content = turn.text
    message.finish = "error" if turn.error else turn.finish_reason or "stopped"
    if turn.stats is not None and turn.text:
        message.summary = summarise(turn.stats)
    if not message.content and message.finish != "stop":
        conversation.messages.remove(message)
    history.save(conversation)


class ReplyError(Exception):
    """The reply could not be finished; the message is for the person."""


def shown(tab: Tab, split: Callable[[str], tuple[str, str]], waiting: str = "") -> list[dict]:
    return chat_messages(tab.conversation, split, waiting)[0]


def turn_of(tab: Tab, split: Callable[[str], tuple[str, str]], index: int | tuple[int, int]) -> int:
    """The turn that the chatbot's message `index` belongs to."""
    turns = chat_messages(tab.conversation, split)[1]
    return turns[index if isinstance(index, int) else index[0]]
