"""`bench edge0`: Edge0 mode against streaming on demand and against gate look-ahead, on the disk and over emulated links.

The arms are alternated within each repeat, all at the same expert memory. Over a link the bandwidth is set so that what on
demand moves for a token takes so many times what computing it takes (the read : compute ratio).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

from engine.bench.measure import Spread, Timed, generate, interpreter_rss, machine, print_table, raw_bandwidth, speed_up
from engine.config import EngineConfig, Mode, format_size
from engine.engine import Engine
from engine.forecast.law import RoutingLaw
from engine.forecast.prerouter import load_prerouter
from engine.store.layout import read_info

ARMS = {
    "on demand": (Mode.ON_DEMAND, "none"),
    "gate look-ahead": (Mode.ON_DEMAND, "gate"),
    "Edge0": (Mode.EDGE0, "none"),
}
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass
class Arm:
    """One way of foreseeing at one place, measured once in every repeat."""

    place: str
    name: str
    seconds: list[float] = field(default_factory=list)
    closeness: list[float] = field(default_factory=list)
    hidden_io: list[float] = field(default_factory=list)
    hit_rate: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    dropped: int = 0
    agreement: float | None = None
    peak_active_bytes: int = 0
    rss_bytes: int = 0


def run_edge0(
    name: str,
    store: Path,
    memory: str,
    repeats: int,
    tokens: int,
    warm_up: int,
    ratios: tuple[float, ...],
    resident: bool,
) -> dict:
    """Measure `store` at `memory` bytes of experts. `resident`: all experts fit in memory, so that the time of computing
    alone can be measured and links can be emulated; else it is a token's time less its stalls, the shortest seen."""
    base = interpreter_rss()
    config = EngineConfig(model=str(store), expert_memory=memory, context=512, prefetch="none", lora=True, device="cpu")
    arms: list[Arm] = []
    compute = {name: [] for name in ARMS}
    bandwidths: list[float] = []
    with Engine(config) as engine:
        if resident:
            for _ in range(repeats):
                for arm in ARMS:
                    compute[arm].append(_timed(engine, arm, "100%", tokens, warm_up).seconds)
        disk = [Arm("disk", arm) for arm in ARMS]
        for _ in range(repeats):
            raw = raw_bandwidth(store / engine.info.experts_file, engine.plan.record_bytes, config.read_threads)
            bandwidths.append(raw)
            _measure(engine, disk, memory, compute, raw, tokens, warm_up, resident)
        arms += disk
        resident_bytes, law = engine.stats().active_bytes_by_kind["resident"], engine.routing_law()
        moved = statistics.median(disk[0].bytes_per_token)
    for ratio in ratios if resident else ():
        rate = int(moved / (ratio * statistics.median(compute["on demand"])))
        linked = [Arm(f"link, ratio {ratio:g}", arm) for arm in ARMS]
        with Engine(EngineConfig(**{**vars(config), "emulated_link": rate})) as engine:
            for _ in range(repeats):
                _measure(engine, linked, memory, compute, rate, tokens, warm_up, resident)
        arms += linked
    seconds = {(arm.place, arm.name): arm.seconds for arm in arms}
    rows = [_row(arm, seconds) for arm in arms]
    raw = Spread.of([b / 1e9 for b in bandwidths])
    print_table(f"{name}, {memory} of experts; raw direct reads {raw} GB/s", rows)
    cost = heads_cost(store, law)
    print(
        f"the heads take {cost * 1e3:.2f} ms a token, {cost / statistics.median(compute['on demand']):.1%} of computing it"
    )
    return {
        "benchmark": "edge0",
        "model": name,
        "machine": machine(),
        "expert_memory": memory,
        "tokens": tokens,
        "warm_up": warm_up,
        "heads_seconds_per_token": cost,
        "compute_seconds_per_token": compute,
        "raw_bandwidth": bandwidths,
        "interpreter_rss_bytes": base,
        "resident_bytes": resident_bytes,
        "arms": [asdict(arm) for arm in arms],
    }


def heads_cost(store: Path, law: RoutingLaw, rounds: int = 20) -> float:
    """Seconds a token that all heads of `store` take, their selection by `law` included; the median of `rounds`."""
    info = read_info(store)
    prerouter = load_prerouter(store, info, torch.device("cpu"))
    m, ran, taken = torch.randn(1, info.hidden), torch.arange(info.top_k), []
    for _ in range(rounds):
        began = time.perf_counter()
        for head in prerouter.heads.values():
            law.select(head.logits(m, ran, ran))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _timed(engine: Engine, arm: str, memory: str, tokens: int, warm_up: int) -> Timed:
    mode, prefetch = ARMS[arm]
    engine.configure(expert_memory=memory, mode=mode, prefetch=prefetch)
    engine.settle()
    engine.restart_peak()
    return generate(engine, list(range(100, 108)), tokens, warm_up)


def _measure(engine, arms, memory, compute, bandwidth, tokens, warm_up, resident) -> None:
    """One repeat: every arm once."""
    for arm in arms:
        timed = _timed(engine, arm.name, memory, tokens, warm_up)
        seconds, moved, stats = timed.seconds, timed.bytes_per_token, timed.stats
        if not resident:
            compute[arm.name].append(seconds - timed.stall_s)
        alone = statistics.median(compute[arm.name]) if resident else min(compute[arm.name])
        arm.seconds.append(seconds)
        arm.closeness.append(max(alone, moved / bandwidth) / seconds)
        arm.hidden_io.append(timed.hidden_io)
        arm.hit_rate.append(stats.hit_rate)
        arm.bytes_per_token.append(moved)
        arm.late.append(stats.late)
        arm.dropped += stats.dropped
        arm.agreement = stats.forecast_agreement
        arm.peak_active_bytes = max(arm.peak_active_bytes, stats.peak_active_bytes)
        arm.rss_bytes = max(arm.rss_bytes, psutil.Process().memory_info().rss)


def _row(arm: Arm, seconds: dict[tuple[str, str], list[float]]) -> dict:
    """seconds: of every arm, by place and name."""
    baselines = {name: speed_up(seconds[arm.place, name], arm.seconds) for name in ("on demand", "gate look-ahead")}
    return {
        "place": arm.place,
        "arm": arm.name,
        "tok/s": Spread.of([1 / s for s in arm.seconds]),
        "x on demand": Spread.of(baselines["on demand"]),
        "x gate": "" if arm.name != "Edge0" else Spread.of(baselines["gate look-ahead"]),
        "hidden I/O": f"{statistics.median(arm.hidden_io):.2f}",
        "hit rate": f"{statistics.median(arm.hit_rate):.2f}",
        "closeness": f"{statistics.median(arm.closeness):.2f}",
        "MB/token": f"{statistics.median(arm.bytes_per_token) / 1e6:.1f}",
        "peak active": format_size(arm.peak_active_bytes),
        "RSS": format_size(arm.rss_bytes),
    }
