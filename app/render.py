"""Conversations become what the page shows without losing a character: a chatbot gets text as it is, HTML gets it escaped,
and every shown message knows which turn it belongs to."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING

from app.history import Conversation, Entry, Message

if TYPE_CHECKING:
    from collections.abc import Callable

FINISHES = {"length": "token limit reached", "stopped": "stopped", "error": "interrupted"}


def chat_messages(
    conversation: Conversation, split: Callable[[str], tuple[str, str]], waiting: str = ""
) -> tuple[list[dict], list[int]]:
    """What the chatbot shows, and for each shown message the index of its turn in `conversation.messages`.

    split: text of a reply -> (reasoning, answer). waiting: a line for a reply that has no text yet.
    """
    shown: list[dict] = []
    turns: list[int] = []
    for index, message in enumerate(conversation.messages):
        parts = [_text("user", message.content)] if message.role == "user" else _reply(message, split, waiting)
        shown += parts
        turns += [index] * len(parts)
    return shown, turns


def _text(role: str, text: str) -> dict:
    # A plain string would be dedented on its way to the page.
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _reply(message: Message, split: Callable[[str], tuple[str, str]], waiting: str) -> list[dict]:
    reasoning, answer = split(message.content)
    parts = []
    if reasoning:
        thinking = message.finish is None and not answer
        title = "Thinking…" if thinking else f"Thought for {len(reasoning.split()):,} words"
        # "done" keeps it folded while it is written too.
        parts.append({**_text("assistant", reasoning), "metadata": {"title": title, "status": "done"}})
    if answer or not parts:
        text = answer or (f'<span class="or-wait">{escape(waiting)}</span>' if message.finish is None else "*No text.*")
        parts.append(_text("assistant", text))
    line = " · ".join(filter(None, [FINISHES.get(message.finish or ""), message.summary.get("line")]))
    if line:
        # An empty thought with a title is a bare line, and copying the reply copies it as text, not as markup.
        parts.append({**_text("assistant", ""), "metadata": {"title": line, "status": "done"}})
    return parts


def notice_html(text: str, again: bool = False) -> str:
    """HTML of a notice, or nothing without a text. again: with a button that asks for the reply once more."""
    button = '<button type="button">Ask again</button>' if again else ""
    return f'<div class="or-notice" role="alert"><span>{escape(text)}</span>{button}</div>' if text else ""


def note_html(text: str, bad: bool = False) -> str:
    return f'<p class="{"bad" if bad else ""}" role="status">{escape(text)}</p>' if text else ""


def listing_html(entries: list[Entry], here: str) -> str:
    """The list of conversations, newest first, in groups by day; `here` is the id of the one that is shown."""
    rows, group = [], ""
    for entry in entries:
        day = day_of(entry.updated, time.time())
        if day != group:
            group = day
            rows.append(f"<h4>{day}</h4>")
        current = ' aria-current="true"' if entry.id == here else ""
        rows.append(
            f'<div class="or-row" role="button" tabindex="0" data-id="{entry.id}"{current}><span>{escape(entry.title)}'
            f'</span><button class="or-delete" type="button" aria-label="Delete">×</button></div>'
        )
    return "".join(rows) or '<p class="or-aside">Your conversations will be listed here.</p>'


def day_of(then: float, now: float) -> str:
    """`Today`, `Yesterday`, `This week` or `Earlier`, by local midnights."""
    midnight = time.mktime((*time.localtime(now)[:3], 0, 0, 0, 0, 0, -1))
    days = (midnight - then) / 86400
    return "Today" if days <= 0 else "Yesterday" if days <= 1 else "This week" if days <= 6 else "Earlier"
