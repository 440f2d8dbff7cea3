"""What every benchmark shares: timing a generation, the raw bandwidth of a file, the machine's description, the
results file."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from engine.config import PROJECT_DIR, GenerationConfig
from engine.engine import Engine
from engine.memory.arena import SlotArena
from engine.stats import EngineStats
from engine.store.reader import RecordReader

RESULTS_DIR = PROJECT_DIR / "engine" / "bench" / "results"
# A fixed seed and temperature 1: every arm generates the same tokens, and random weights do not fall into a loop.
SAMPLED = dict(temperature=1.0, seed=7)


@dataclass(frozen=True)
class Spread:
    """Median, least and most of repeated measurements."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


@dataclass(frozen=True)
class Timed:
    """One generation, its decoding alone: seconds, bytes read and seconds stalled a token, and the share of reading that was
    hidden. stats: of the whole request, its prefill included."""

    seconds: float
    bytes_per_token: float
    stall_s: float
    hidden_io: float
    stats: EngineStats


def generate(engine: Engine, prompt: list[int], tokens: int, warm_up: int) -> Timed:
    """Time `tokens` tokens after a warm-up generation of `warm_up` tokens.

    Both start without a conversation cache; the experts' slots stay as the warm-up left them.
    """
    complete(engine, prompt, GenerationConfig(max_tokens=warm_up, **SAMPLED))
    return timed(engine, prompt, GenerationConfig(max_tokens=tokens + 1, **SAMPLED))


def complete(engine: Engine, prompt: list[int], generation: GenerationConfig) -> EngineStats | None:
    """Make a reply without a conversation cache; the statistics when its first token came."""
    engine.reset()
    prefilled = None
    for _ in engine.complete(prompt, generation):
        prefilled = prefilled or engine.stats()
    return prefilled


def said(engine: Engine, prompt: list[int], generation: GenerationConfig) -> list[int]:
    """Token ids of a reply without a conversation cache."""
    engine.reset()
    return [token for chunk in engine.complete(prompt, generation) for token in chunk.token_ids]


def timed(engine: Engine, prompt: list[int], generation: GenerationConfig) -> Timed:
    """`complete`, timed."""
    prefilled = complete(engine, prompt, generation)
    stats = engine.stats()
    decoded = stats.completion_tokens - 1
    if decoded < 1:
        raise RuntimeError("the model ended its reply at once: nothing to time")
    stall, read = stats.stall_s - prefilled.stall_s, stats.read_s - prefilled.read_s
    moved = (stats.bytes_read - prefilled.bytes_read) / decoded
    return Timed(1 / stats.tok_s, moved, stall / decoded, max(0.0, 1 - stall / read) if read > 0 else 1.0, stats)


def speed_up(over: list[float], seconds: list[float]) -> list[float]:
    """Repeat by repeat, from the seconds a token of two arms."""
    return [slow / fast for slow, fast in zip(over, seconds, strict=True)]


@contextmanager
def reading(path: Path, record_bytes: int, threads: int) -> Iterator[Callable[[], float]]:
    """Meanwhile `threads` threads read random records of `path` directly, one after the other. Yields the function that says at
    how many bytes a second they have done so."""
    count = path.stat().st_size // record_bytes
    arena = SlotArena(threads, record_bytes, torch.device("cpu"))
    reader = RecordReader(path, record_bytes)
    done = [0] * threads
    ended = threading.Event()
    began = time.perf_counter()

    def work(index: int) -> None:
        at = index * 7919 + 1
        while not ended.is_set():
            at = (at * 1103515245 + 12345) % (2**31)
            reader.read_into(at % count, arena.memory(index))
            done[index] += record_bytes

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield lambda: sum(done) / (time.perf_counter() - began)
    finally:
        ended.set()
        for worker in workers:
            worker.join()
        reader.close()
        arena.close()


def raw_bandwidth(path: Path, record_bytes: int, threads: int, seconds: float = 1.5) -> float:
    """Bytes a second of direct reads of random records of `path` by `threads` threads."""
    with reading(path, record_bytes, threads) as rate:
        time.sleep(seconds)
        return rate()


def interpreter_rss() -> int:
    """Resident set of a process that has only imported the engine and torch, bytes: what is no model's fault."""
    code = "import engine, transformers, psutil; print(psutil.Process().memory_info().rss)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT_DIR)
    return int(output.stdout.split()[-1])


def machine() -> dict:
    """The conditions a figure belongs to."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": psutil.getloadavg()[0],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save(name: str, result: dict, directory: Path = RESULTS_DIR) -> Path:
    """Write a result under a name that does not exist yet."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}.json"
    with path.open("x") as file:
        json.dump(result, file, indent=1)
    return path


def print_table(title: str, rows: list[dict]) -> None:
    """Rows with the same keys as an aligned table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=160).print(table)
