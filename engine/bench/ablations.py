"""`bench specter-ablations`: one point of `bench specter`'s sweep, with one thing changed at a time.

What changes the schedule is compared at a fixed depth, where every arm drafts and verifies the same windows, so that texts that
are guessed better or worse do not hide it. What changes the windows is compared with Specter as it is.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from engine.bench.measure import Spread, machine, print_table, speed_up
from engine.bench.specter import Arm, alternate, reply, settled
from engine.config import EngineConfig, Mode
from engine.engine import Engine
from engine.forecast.draft import Scheduling
from engine.residency.policy import Lfru
from engine.store.draft import draft_bytes
from engine.store.layout import read_info

FIXED = (2, 4, 8, 12, 16)
SCHEDULED = 8  # depth at which changes of the schedule are compared


class Lru(Lfru):
    """The least recently used expert gives way, whatever else is known of it."""

    def __init__(self, layers: int, experts: int, half_life: float) -> None:
        super().__init__(layers, experts, half_life)
        self._used = np.full(layers * experts, -1)

    def touch(self, keys: list[int], now: int) -> None:
        super().touch(keys, now)
        self._used[keys] = now

    def victim(self, slots: np.ndarray, key_of: np.ndarray) -> int:
        return int(slots[np.argmin(self._used[key_of[slots]])])


def _schedule(engine: Engine, **changes) -> None:
    engine.forecast.scheduling = Scheduling(**{"fetch": "drafting", **changes})


def _use_lru(engine: Engine) -> None:
    _schedule(engine, keep=False)
    engine.tier.policy = Lru(engine.tier.layers, engine.tier.experts, engine.tier.policy.half_life)


# Ablation of the schedule -> what is changed of an engine in specter mode.
CHANGES = {
    "no prefetch": lambda engine: _schedule(engine, fetch="none"),
    "prefetch after drafting": lambda engine: _schedule(engine, fetch="after"),
    "barrier before verification": lambda engine: _schedule(engine, barrier=True),
    "LRU, window not kept": _use_lru,
}


def run_ablations(
    name: str, store: Path, repeats: int, tokens: int, warm_up: int, memory: str, ratio: float, bits: tuple[int, ...]
) -> dict:
    """Nothing is parked here, and what is drafted is always fetched early, except where that is what is changed."""
    info = read_info(store)
    config = EngineConfig(model=str(store), expert_memory="100%", prefetch="none", context=512, device="cpu")
    with Engine(config) as engine:
        engine.settle()
        alone = statistics.median(reply(engine, r, tokens, warm_up).seconds for r in range(repeats))
        engine.configure(expert_memory=memory)
        moved = statistics.median(reply(engine, r, tokens, warm_up).bytes_per_token for r in range(repeats))
    # Arm -> depth, bits of the draft, what is changed
    arms = {"Specter": ("auto", bits[0], None)}
    arms |= {f"depth {depth}": (depth, bits[0], None) for depth in FIXED}
    arms |= {f"{b}-bit draft": ("auto", b, None) for b in bits[1:]}
    arms |= {label: (SCHEDULED, bits[0], change) for label, change in CHANGES.items()}
    points = [Arm(memory, f"link, ratio {ratio:g}", label) for label in arms]
    rate = int(moved / (ratio * alone))
    link = replace(config, expert_memory=memory, emulated_link=rate, mode=Mode.SPECTER, prefetch="gate")
    with ExitStack() as engines:
        pairs = []
        for arm in points:
            depth, draft_bits, change = arms[arm.name]
            engine = settled(replace(link, depth=depth, draft_bits=draft_bits), repeats, change=change)
            pairs.append((engines.enter_context(engine), arm))
        alternate(pairs, repeats, tokens, warm_up)
    print_table(f"{name}: ablations", ablation_rows(points))
    return {"benchmark": "specter-ablations", "model": name, "machine": machine(), "tokens": tokens, "warm_up": warm_up,
            "memory": memory, "ratio": ratio, "compute_seconds_per_token": alone,
            "draft_bytes": {str(b): draft_bytes(info, b) for b in bits}, "expert_bytes": info.expert_bytes_total,
            "points": [asdict(p) for p in points]}  # fmt: skip


def ablation_rows(points: list[Arm]) -> list[dict]:
    """TPOT of each arm, and its speed over that of what it is compared with, repeat by repeat."""
    seconds = {arm.name: arm.seconds for arm in points}
    rows = []
    for arm in points:
        against = f"depth {SCHEDULED}" if arm.name in CHANGES else "Specter"
        rows.append({
            "arm": arm.name,
            "TPOT ms": Spread.of([s * 1e3 for s in arm.seconds]),
            "speed": Spread.of(speed_up(seconds[against], arm.seconds)),
            "of": against,
            "accepted": f"{statistics.median(arm.accepted):.1f}" if arm.accepted else "",
            "recall": f"{statistics.median(arm.recall):.3f}" if arm.recall else "",
            "stall ms": f"{statistics.median(arm.stall_s) * 1e3:.0f}",
            "MB/token": f"{statistics.median(arm.bytes_per_token) / 1e6:.1f}",
        })  # fmt: skip
    return rows
