"""Conversations become chatbot messages without losing a character: text is passed as it is, and every shown message
knows which turn it belongs to."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from app.history import Conversation, Message

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
