"""Device slots copied over a link give what host slots give, whatever the copies' timing: the CUDA path's logic, without CUDA."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.config import EngineConfig
from engine.memory.arena import SlotArena
from engine.residency.build import device_tier, host_tier
from engine.residency.copy import CopyFetcher, EmulatedLink
from engine.residency.policy import Lfru
from engine.residency.tier import Tier
from engine.store.layout import read_info
from engine.store.reader import RecordReader
from engine.store.writer import prepare
from tests.tiny_models import write_checkpoint


class SlowMark:
    """A mark reached when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(10), "a mark was waited for that nobody reaches"


class AsyncLink:
    """A device: copies end late, in order, and computation is a queue that runs behind the host, as on CUDA."""

    name = "fake"

    def __init__(self) -> None:
        self.work: list = []  # the device's queue: (what, mark)
        self.compute_mark: SlowMark | None = None
        self.overwrites = 0

    def copy(self, source, target, after):
        mark = SlowMark()

        def run() -> None:
            if after is not None and not after.query():
                self.overwrites += 1  # the slot's last use was not over: the copy would destroy it
            time.sleep(0.001)
            target.copy_(source)
            mark.reached.set()

        if after is not None:
            after.synchronize()
        threading.Thread(target=run, daemon=True).start()
        return mark

    def order_compute(self, mark) -> None:
        mark.synchronize()

    def mark_compute(self):
        mark = SlowMark()
        threading.Timer(0.002, mark.reached.set).start()
        return mark

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("copy")
    checkpoint = write_checkpoint("qwen3_moe", directory / "checkpoint")
    return prepare(checkpoint, directory / "store", "bf16")


def records_of(store):
    info = read_info(store)
    arena = SlotArena(1, info.layout.record_bytes, torch.device("cpu"))
    reader = RecordReader(store / info.experts_file, info.layout.record_bytes)
    result = []
    for index in range(len(info.layers) * info.experts):
        reader.read_into(index, arena.memory(0))
        result.append(arena.record(0).clone())
    reader.close()
    return info, result


@pytest.mark.parametrize("link", [lambda: EmulatedLink(50e6, 1e-4), AsyncLink], ids=["emulated", "asynchronous"])
@pytest.mark.parametrize(("host_slots", "slots"), [(2, 3), (4, 12), (24, 24)])
def test_every_lease_sees_its_own_record(store, link, host_slots, slots):
    info, expected = records_of(store)
    link = link()
    host = host_tier(store, info, host_slots, EngineConfig())
    tier = device_tier(host, slots, torch.device("cpu"), link)
    generator = torch.Generator().manual_seed(1)
    for step in range(60):
        layer = step % len(info.layers)
        ids = torch.randperm(info.experts, generator=generator)[:3].tolist()
        if step % 3 == 0:
            guess = torch.randperm(info.experts, generator=generator)[:2].tolist()
            tier.prefetch([(layer + 1) % len(info.layers) * info.experts + i for i in guess], tier.clock + 2)
        for batch in tier.lease([layer * info.experts + i for i in ids]):
            for key, slot in batch:
                assert torch.equal(tier.arena.record(slot), expected[key])
    counters = tier.counters
    assert counters.hits + counters.late + counters.misses == 180
    assert getattr(link, "overwrites", 0) == 0
    tier.settle()
    tier.close()


def test_a_failed_read_below_reaches_the_lease_above(store):
    info = read_info(store)

    class Broken(RecordReader):
        def read_into(self, index, target):
            raise OSError("broken disk")

    from engine.residency.fetch import StoreFetcher

    arena = SlotArena(4, info.layout.record_bytes, torch.device("cpu"))
    reader = Broken(store / info.experts_file, info.layout.record_bytes)
    shape = (len(info.layers), info.experts)
    host = Tier(*shape, arena, StoreFetcher(reader, arena, 2), Lfru(*shape, 64))
    target = SlotArena(4, info.layout.record_bytes, torch.device("cpu"))
    tier = Tier(*shape, target, CopyFetcher(host, target, EmulatedLink(1e9)), Lfru(*shape, 64))
    with pytest.raises(OSError, match="broken disk"):
        list(tier.lease([0, 1]))
    tier.close()
