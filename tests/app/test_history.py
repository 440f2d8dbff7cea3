"""Conversations come back exactly, are never overwritten by another tab, and belong to one person."""

from __future__ import annotations

import json
import os
import stat
import sys

import pytest

from app import export
from app.history import Archive, Conversation, History, Message


def talk(*texts: str) -> Conversation:
    conversation = Conversation(system="Be brief.")
    conversation.messages = [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]
    conversation.name_after(texts[0])
    return conversation


def test_a_conversation_comes_back_as_it_was(tmp_path):
    path = tmp_path / "deep" / "history.sqlite3"
    history = History(path)
    saved = talk("  indented\n\tand «odd» 🐎\n", "<think>\nhm\n</think>\n\nok")
    saved.messages[1].summary, saved.messages[1].finish = {"line": "3 tokens", "tok_s": None}, "stop"
    history.save(saved)
    history.close()
    again = History(path).load(saved.id)
    assert again == saved and again.revision == 1
    if sys.platform != "win32":
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_list_is_newest_first_and_deleting_removes(tmp_path):
    history = History(tmp_path / "h.sqlite3")
    first, second = talk("one"), talk("two")
    history.save(first)
    history.save(second)
    history.save(first)
    assert [entry.title for entry in history.entries()] == ["one", "two"]
    history.delete(first.id)
    assert [entry.id for entry in history.entries()] == [second.id] and history.load(first.id) is None


def test_two_tabs_with_one_conversation_never_overwrite_each_other(tmp_path):
    history = History(tmp_path / "h.sqlite3")
    mine = talk("question")
    history.save(mine)
    theirs = history.load(mine.id)
    mine.messages.append(Message("assistant", "mine"))
    theirs.messages.append(Message("assistant", "theirs"))
    history.save(mine)
    history.save(theirs)
    assert theirs.id != mine.id and theirs.title == "question (copy)"
    assert [history.load(c.id).messages[-1].content for c in (mine, theirs)] == ["mine", "theirs"]
    history.save(theirs)
    assert len(history.entries()) == 2


def test_a_conversation_deleted_elsewhere_is_saved_anew(tmp_path):
    history = History(tmp_path / "h.sqlite3")
    mine = talk("question")
    history.save(mine)
    history.delete(mine.id)
    history.save(mine)
    assert [entry.id for entry in history.entries()] == [mine.id]


def test_a_damaged_file_is_kept_aside_and_said(tmp_path):
    path = tmp_path / "h.sqlite3"
    path.write_bytes(b"this is no database " * 100)
    history = History(path)
    history.save(talk("new"))
    kept = list(tmp_path.glob("h.sqlite3.damaged-*"))
    assert len(kept) == 1 and kept[0].read_bytes().startswith(b"this is no database") and str(kept[0]) in history.notice
    assert len(History(path).entries()) == 1


def test_without_a_place_to_write_it_goes_on_in_memory_and_says_so(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    history = History(blocked / "h.sqlite3")
    history.save(talk("kept for now"))
    assert len(history.entries()) == 1 and "in memory only" in history.notice


def test_each_account_has_its_own_file_and_a_guest_none(tmp_path):
    archive = Archive(tmp_path, "guest")
    archive.of(None).save(talk("the owner's"))
    archive.of("ada").save(talk("ada's"))
    archive.of("a/../da").save(talk("another's"))
    assert [[e.title for e in archive.of(who).entries()] for who in (None, "ada", "a/../da")] == [
        ["the owner's"], ["ada's"], ["another's"]]  # fmt: skip
    one, other = archive.of("guest"), archive.of("guest")
    one.save(talk("passing"))
    assert other.entries() == [] and archive.of("guest").entries() == []
    assert len(list(tmp_path.iterdir())) == 3 and all(path.parent == tmp_path for path in tmp_path.iterdir())
    archive.close()


@pytest.mark.parametrize(("text", "title"), [("  Hello\n there ", "Hello there"), ("x" * 80, "x" * 59 + "…")])
def test_titles_are_the_first_words_in_one_line(text, title):
    assert talk(text).title == title


def test_exports_hold_everything_said():
    conversation = talk("What is *this*?", "A test.")
    conversation.messages[1].summary = {"line": "2 tokens"}
    markdown = export.to_markdown(conversation)
    for part in ("# What is *this*?", "## System prompt\n\nBe brief.", "## You\n\nWhat", "A test.\n\n*2 tokens*"):
        assert part in markdown
    record = json.loads(export.to_json(conversation))
    assert record["system"] == "Be brief." and record["messages"][1]["content"] == "A test."
    assert export.file_name(conversation, "md") == "outrider-what-is-this.md"
    assert export.file_name(talk("../..\\:?"), "json") == "outrider-chat.json"
