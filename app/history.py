"""Conversations on disk: a save replaces exactly what this tab had read, or becomes a copy; nothing is overwritten.

One SQLite file per person, readable by its owner alone, in a data directory passed as an argument.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, system TEXT NOT NULL, messages TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL, revision INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_time ON conversations (updated DESC);
"""
UNTITLED = "New chat"


def default_data_dir() -> Path:
    """Where this system keeps a person's application data, with `outrider` appended."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "outrider"


@dataclass
class Message:
    """One turn. `content` is the raw text, reasoning tags included; `summary` and `finish` belong to replies.

    summary: figures of the reply as they were when it ended: see `panels.summarise`.
    finish: `stop`, `length`, `stopped` (by the person) or `error`; None while it is being written.
    """

    role: str
    content: str
    summary: dict = field(default_factory=dict)
    finish: str | None = None


@dataclass
class Conversation:
    """A system prompt and turns; `revision` is the number of saves this copy has seen, 0 for one never saved."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    title: str = UNTITLED
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    revision: int = 0

    def name_after(self, text: str) -> None:
        """Take the title from the first thing the person said."""
        line = re.sub(r"\s+", " ", text).strip()
        self.title = line if len(line) <= 60 else line[:59].rstrip() + "…"


@dataclass(frozen=True)
class Entry:
    """A line of the list of conversations."""

    id: str
    title: str
    updated: float


class History:
    """The conversations of one person. `path=None` keeps them in memory until `close`.

    A file that is no readable database is moved aside, never deleted; a directory that cannot be written leaves the
    history in memory. Either way `notice` holds a sentence for the person.
    """

    def __init__(self, path: Path | None) -> None:
        self.notice = ""
        self._lock = threading.Lock()
        self._db = self._open(path)

    def _open(self, path: Path | None) -> sqlite3.Connection:
        if path is None:
            return _connect(":memory:")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            return _connect(path)
        except sqlite3.OperationalError as error:
            self.notice = f"Conversations are kept in memory only: {path} cannot be used ({error})."
        except sqlite3.DatabaseError:
            aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
            path.replace(aside)
            self.notice = f"The saved conversations could not be read. The file was kept as {aside}."
            return _connect(path)
        except OSError as error:
            self.notice = f"Conversations are kept in memory only: {path.parent} cannot be written ({error.strerror})."
        return _connect(":memory:")

    def entries(self) -> list[Entry]:
        """All conversations, the most recently changed first."""
        with self._lock:
            rows = self._db.execute("SELECT id, title, updated FROM conversations ORDER BY updated DESC").fetchall()
        return [Entry(*row) for row in rows]

    def load(self, id: str) -> Conversation | None:
        """The conversation, or None when it is not (or no longer) there."""
        columns = "system, messages, title, id, created, updated, revision"
        with self._lock:
            row = self._db.execute(f"SELECT {columns} FROM conversations WHERE id = ?", (id,)).fetchone()
        return row and Conversation(row[0], [Message(**m) for m in json.loads(row[1])], *row[2:])

    def save(self, conversation: Conversation) -> None:
        """Write `conversation`, advancing its revision. When another tab has changed or deleted it since it was
        loaded, it becomes a new conversation (its `id` and `title` change) instead of overwriting."""
        c, now = conversation, time.time()
        messages = json.dumps([asdict(m) for m in c.messages], ensure_ascii=False)
        with self._lock, self._db:
            if c.revision:
                changed = self._db.execute(
                    "UPDATE conversations SET title = ?, system = ?, messages = ?, updated = ?, revision = ? "
                    "WHERE id = ? AND revision = ?",
                    (c.title, c.system, messages, now, c.revision + 1, c.id, c.revision),
                ).rowcount
                if not changed:
                    c.id, c.title, c.revision = uuid.uuid4().hex, f"{c.title} (copy)", 0
            if not c.revision:
                self._db.execute(
                    "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (c.id, c.title, c.system, messages, c.created, now, 1),
                )
        c.revision, c.updated = c.revision + 1, now

    def delete(self, id: str) -> None:
        with self._lock, self._db:
            self._db.execute("DELETE FROM conversations WHERE id = ?", (id,))

    def close(self) -> None:
        with self._lock:
            self._db.close()


class Archive:
    """Whose history is whose: one file for the person at this computer, one for each account, and for
    the account `guest` none at all: each of its tabs has a history of its own, in memory."""

    def __init__(self, directory: Path | None, guest: str) -> None:
        self._directory, self._guest = directory, guest
        self._open: dict[str | None, History] = {}
        self._lock = threading.Lock()

    def of(self, account: str | None) -> History:
        """The history of `account`; None is the person at this computer, who did not have to log in."""
        if self.is_passing(account):
            return History(None)
        with self._lock:
            if account not in self._open:
                self._open[account] = History(self._directory / self._file(account))
            return self._open[account]

    def is_passing(self, account: str | None) -> bool:
        """Whether a history of `account` lasts as long as its tab."""
        return self._directory is None or account == self._guest

    @staticmethod
    def _file(account: str | None) -> str:
        if account is None:
            return "history.sqlite3"
        # The digest tells apart names that read the same once unsafe characters are gone.
        plain = re.sub(r"[^A-Za-z0-9_-]", "", account)[:32]
        return f"history-{plain}-{hashlib.sha256(account.encode()).hexdigest()[:12]}.sqlite3"

    def close(self) -> None:
        with self._lock:
            for history in self._open.values():
                history.close()
            self._open.clear()


def _connect(path: Path | str) -> sqlite3.Connection:
    # One connection serves all threads, behind History's lock.
    db = sqlite3.connect(path, timeout=5, check_same_thread=False)
    try:
        db.executescript(_SCHEMA)
    except sqlite3.Error:
        db.close()
        raise
    return db
