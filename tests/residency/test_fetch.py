"""The queue behind a tier: most urgent first, errors to their slot, and a clean end."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.errors import ReadError
from engine.memory.arena import SlotArena
from engine.residency.fetch import DEMAND, LinkMeter, QueuedFetcher, StoreFetcher
from engine.store.reader import RecordReader
from tests.residency.manual_fetcher import until


class Recorder(QueuedFetcher):
    """Transfers nothing; the first transfer waits for `gate`."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__(threads, "recorder")
        self.gate, self.entered = threading.Event(), threading.Event()
        self.order: list[int] = []
        self.ended: dict[int, Exception | None] = {}
        self.all_done = threading.Semaphore(0)
        self.start(self.claim, self.done)

    def claim(self, slot: int, ticket: int) -> bool:
        return ticket != 99

    def done(self, slot: int, error: Exception | None) -> None:
        self.ended[slot] = error
        self.all_done.release()

    def transfer(self, key: int, slot: int) -> int:
        self.order.append(key)
        self.entered.set()
        assert self.gate.wait(30)
        if key == 13:
            raise ReadError("unlucky")
        return 10


def test_the_most_urgent_goes_first_and_equals_go_in_order():
    fetcher = Recorder()
    fetcher.submit(1, 1, 0, 50)
    assert fetcher.entered.wait(30)
    for key, urgency in ((2, 50), (3, 40), (4, DEMAND), (5, 40), (6, DEMAND)):
        fetcher.submit(key, key, 0, urgency)
    fetcher.gate.set()
    for _ in range(6):
        assert fetcher.all_done.acquire(timeout=30)
    fetcher.close()
    assert fetcher.order == [1, 4, 6, 3, 5, 2]


def test_what_is_no_longer_wanted_is_not_fetched_and_an_error_goes_to_its_slot():
    fetcher = Recorder()
    fetcher.gate.set()
    for key, ticket in ((1, 0), (2, 99), (13, 0), (3, 0)):
        fetcher.submit(key, key, ticket, 0)
    for _ in range(3):
        assert fetcher.all_done.acquire(timeout=30)
    fetcher.close()
    assert 2 not in fetcher.order
    assert {slot: type(error) for slot, error in fetcher.ended.items()} == {
        1: type(None),
        13: ReadError,
        3: type(None),
    }
    assert fetcher.meter.bytes == 20


def test_close_drops_the_queue_and_waits_for_what_is_under_way():
    fetcher = Recorder()
    fetcher.submit(1, 1, 0, 0)
    fetcher.submit(2, 2, 0, 0)
    assert fetcher.entered.wait(30)
    closer = threading.Thread(target=fetcher.close)
    closer.start()
    until(lambda: not fetcher._queue)
    fetcher.gate.set()
    closer.join(30)
    assert not closer.is_alive()
    assert fetcher.order == [1]
    assert 1 in fetcher.ended


def test_overlapping_transfers_are_busy_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("engine.residency.fetch.time.perf_counter", lambda: now[0])
    meter = LinkMeter()
    for at, action in ((1, meter.begin), (2, meter.begin), (4, lambda: meter.end(100)), (5, lambda: meter.end(50))):
        now[0] = at
        action()
    assert (meter.busy_s, meter.bytes) == (4, 150)
    now[0] = 10
    meter.begin()
    now[0] = 12
    assert meter.busy_now() == 6
    assert meter.busy_s == 4


@pytest.mark.parametrize("page_cache", [False, True])
def test_a_store_fetcher_fills_the_slot_with_the_record(tmp_path, page_cache):
    (tmp_path / "experts.bin").write_bytes(b"".join(bytes([i]) * 4096 for i in range(5)))
    arena, ended = SlotArena(2, 4096, torch.device("cpu")), threading.Semaphore(0)
    fetcher = StoreFetcher(RecordReader(tmp_path / "experts.bin", 4096, page_cache), arena, threads=2)
    fetcher.start(lambda slot, ticket: True, lambda slot, error: ended.release())
    fetcher.submit(3, 0, 0, 0)
    fetcher.submit(1, 1, 0, 0)
    for _ in range(2):
        assert ended.acquire(timeout=30)
    assert (arena.record(0) == 3).all()
    assert (arena.record(1) == 1).all()
    fetcher.close()
    assert fetcher.meter.bytes == 2 * 4096
