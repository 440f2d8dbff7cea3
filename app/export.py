"""An exported conversation holds everything that was said, in a form other programs read."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict

from app.history import Conversation

_SPEAKER = {"user": "You", "assistant": "Model", "system": "System prompt"}


def to_markdown(conversation: Conversation) -> str:
    """Headed sections, one a turn; a reply's figures follow it in italics."""
    parts = [f"# {conversation.title}", time.strftime("%Y-%m-%d %H:%M", time.localtime(conversation.created))]
    if conversation.system:
        parts += ["## System prompt", conversation.system]
    for message in conversation.messages:
        parts += [f"## {_SPEAKER[message.role]}", message.content]
        if message.summary.get("line"):
            parts.append(f"*{message.summary['line']}*")
    return "\n\n".join(parts) + "\n"


def to_json(conversation: Conversation) -> str:
    """One object: title, times (seconds since 1970), system prompt and messages with role, content, figures."""
    record = asdict(conversation)
    del record["revision"]
    return json.dumps(record, ensure_ascii=False, indent=2) + "\n"


def file_name(conversation: Conversation, suffix: str) -> str:
    """A name every file system takes."""
    words = re.sub(r"[^\w-]+", "-", conversation.title.lower()).strip("-")[:40] or "chat"
    return f"outrider-{words}.{suffix}"
