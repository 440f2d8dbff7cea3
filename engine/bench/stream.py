"""`bench stream`: how close streaming comes to the limit at several budgets.

The limit is max(compute, bytes / raw bandwidth), as if reading and computing took nothing from each other. What this machine
can do of both at once, with nothing ever waited for, is measured too: everything resident, while the same threads read.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from engine.bench.measure import Spread, generate, interpreter_rss, machine, print_table, raw_bandwidth, reading
from engine.config import EngineConfig, format_size
from engine.engine import Engine

BUDGETS = ("10%", "25%", "50%")


@dataclass
class Arm:
    """One budget and prefetch, measured once in every repeat."""

    budget: str
    prefetch: str
    seconds: list[float] = field(default_factory=list)
    closeness: list[float] = field(default_factory=list)
    to_both: list[float] = field(default_factory=list)
    hit_rate: list[float] = field(default_factory=list)
    hidden_io: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    late: int = 0
    dropped: int = 0
    peak_active_bytes: int = 0
    plan_bytes: int = 0
    rss_bytes: int = 0


@dataclass(frozen=True)
class Both:
    """Computing and reading at once: seconds a token with everything resident, alone and while reading, and bytes a second read
    while computing."""

    alone: float
    beside: float
    bandwidth: float

    def seconds(self, size: float, raw: float) -> float:
        """The least a token takes that needs `size` bytes, of which `raw` a second can be read while nothing is computed."""
        reads = size / self.bandwidth
        if reads < self.beside:  # the rest of the computing is alone
            return reads + (1 - reads / self.beside) * self.alone
        return self.beside + (size - self.beside * self.bandwidth) / raw


def run_stream(name: str, store: Path, repeats: int, tokens: int, warm_up: int) -> dict:
    """Measure `store`. Arms are alternated within each repeat, beside the all-resident time and the raw bandwidth."""
    base = interpreter_rss()
    arms = [Arm(b, p) for b in BUDGETS for p in ("none", "gate")]
    resident: list[Both] = []
    bandwidths: list[float] = []
    config = EngineConfig(model=str(store), expert_memory="100%", context=1024, prefetch="none")
    with Engine(config) as engine:
        prompt = list(range(100, 132))
        records = store / engine.info.experts_file, engine.plan.record_bytes, config.read_threads
        full_rss = 0
        for _ in range(repeats):
            engine.configure(expert_memory="100%", prefetch="none")
            engine.settle()
            compute = generate(engine, prompt, tokens, warm_up).seconds
            with reading(*records) as rate:
                beside = generate(engine, prompt, tokens, warm_up).seconds
                both = Both(compute, beside, rate())
            resident.append(both)
            full_rss = max(full_rss, psutil.Process().memory_info().rss)
            for arm in arms:
                engine.configure(expert_memory=arm.budget, prefetch=arm.prefetch)
                engine.restart_peak()
                raw = raw_bandwidth(*records)
                bandwidths.append(raw)
                timed = generate(engine, prompt, tokens, warm_up)
                seconds, bytes_per_token, stats = timed.seconds, timed.bytes_per_token, timed.stats
                arm.seconds.append(seconds)
                arm.closeness.append(max(compute, bytes_per_token / raw) / seconds)
                arm.to_both.append(both.seconds(bytes_per_token, raw) / seconds)
                arm.hit_rate.append(stats.hit_rate)
                arm.hidden_io.append(timed.hidden_io)
                arm.bytes_per_token.append(bytes_per_token)
                arm.late, arm.dropped = arm.late + stats.late, arm.dropped + stats.dropped
                arm.peak_active_bytes = max(arm.peak_active_bytes, stats.peak_active_bytes)
                arm.plan_bytes = engine.plan.total_bytes
                arm.rss_bytes = max(arm.rss_bytes, stats.rss_bytes or 0)
        resident_bytes = engine.stats().active_bytes_by_kind["resident"]
    rows = [_row(arm, base, resident_bytes, engine.plan.expert_bytes_total) for arm in arms]
    rate, slowed = (Spread.of([1 / s for s in seconds]) for seconds in zip(*((b.alone, b.beside) for b in resident)))
    raw, shared = Spread.of([b / 1e9 for b in bandwidths]), Spread.of([b.bandwidth / 1e9 for b in resident])
    print_table(f"{name}: all resident {rate} tok/s, raw direct reads {raw} GB/s; both at once {slowed} and {shared}", rows)
    return {"benchmark": "stream", "model": name, "machine": machine(), "tokens": tokens, "warm_up": warm_up,
            "resident": [asdict(both) for both in resident], "raw_bandwidth": bandwidths, "interpreter_rss_bytes": base,
            "resident_bytes": resident_bytes, "all_resident_rss_bytes": full_rss,
            "arms": [asdict(arm) for arm in arms]}  # fmt: skip


def _row(arm: Arm, base: int, resident_bytes: int, total: int) -> dict:
    budget = int(float(arm.budget.rstrip("%")) / 100 * total)
    beyond = arm.rss_bytes - base - resident_bytes - budget
    return {
        "budget": arm.budget,
        "prefetch": arm.prefetch,
        "tok/s": Spread.of([1 / s for s in arm.seconds]),
        "closeness": Spread.of(arm.closeness),
        "to both at once": Spread.of(arm.to_both),
        "hit rate": f"{statistics.median(arm.hit_rate):.2f}",
        "hidden I/O": f"{statistics.median(arm.hidden_io):.2f}",
        "MB/token": f"{statistics.median(arm.bytes_per_token) / 1e6:.1f}",
        "peak active / plan": f"{format_size(arm.peak_active_bytes)} / {format_size(arm.plan_bytes)}",
        "RSS beyond": format_size(beyond),
    }
