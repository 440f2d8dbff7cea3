"""A record is read whole and from the right place, or the error says which file ended or failed where."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch

from engine.errors import ReadError
from engine.memory.arena import SlotArena
from engine.store.reader import RecordReader

RECORD = 3 * 4096


@pytest.fixture
def experts(tmp_path):
    content = random.Random(0).randbytes(7 * RECORD)
    path = tmp_path / "experts.bin"
    path.write_bytes(content)
    return path, content


@pytest.mark.parametrize("page_cache", [False, True])
def test_records_from_several_threads(experts, page_cache):
    path, content = experts
    reader, arena, wrong = RecordReader(path, RECORD, page_cache), SlotArena(4, RECORD, torch.device("cpu")), []

    def read(slot: int) -> None:
        for index in random.Random(slot).choices(range(7), k=40):
            reader.read_into(index, arena.memory(slot))
            if bytes(arena.memory(slot)) != content[index * RECORD : (index + 1) * RECORD]:
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert wrong == []
    assert not (page_cache and reader.direct)


def test_reads_without_positioned_reads(experts, monkeypatch):
    """As on Windows, where each thread has a file of its own."""
    monkeypatch.delattr(os, "preadv")
    path, content = experts
    reader, arena = RecordReader(path, RECORD), SlotArena(1, RECORD, torch.device("cpu"))
    for index in (6, 0, 3):
        reader.read_into(index, arena.memory(0))
        assert bytes(arena.memory(0)) == content[index * RECORD : (index + 1) * RECORD]
    reader.close()


def test_a_file_that_ends_early(experts):
    path, content = experts
    reader, arena = RecordReader(path, RECORD), SlotArena(1, RECORD, torch.device("cpu"))
    os.truncate(path, 5 * RECORD + 4096)
    reader.read_into(4, arena.memory(0))
    with pytest.raises(
        ReadError, match=rf"{path} ends at byte {5 * RECORD + 4096}, inside record 5.*prepare the model again"
    ):
        reader.read_into(5, arena.memory(0))
    reader.close()


def test_a_read_that_fails(experts):
    path, _ = experts
    reader, arena = RecordReader(path, RECORD), SlotArena(1, RECORD, torch.device("cpu"))
    os.close(reader._descriptor)
    with pytest.raises(
        ReadError, match=rf"cannot read {path} at byte {2 * RECORD}: Bad file descriptor; check the disk"
    ):
        reader.read_into(2, arena.memory(0))
