"""`bench specter`: Specter mode against streaming on demand and gate look-ahead, every arm in the same memory, the draft's bytes
included.

Every arm has an engine of its own; they are alternated within each repeat and decode the same prompts greedily. Over a link the
bandwidth is set so that what on demand moves for a token takes so many times what computing it takes, at the same memory (the
transfer : compute ratio).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.bench.measure import Spread, Timed, complete, machine, print_table, raw_bandwidth, speed_up, timed
from engine.bench.prompts import PROMPTS
from engine.config import EngineConfig, GenerationConfig, Mode
from engine.engine import Engine
from engine.store.draft import draft_bytes
from engine.store.layout import read_info

MEMORIES = ("35%", "45%", "60%")
RATIOS = (1.0, 2.0, 4.0, 8.0)
# Arm -> mode, prefetch. `Specter` is what a person gets: depth and, between replies, parking are chosen by itself.
ARMS = {
    "on demand": (Mode.ON_DEMAND, "none"),
    "gate look-ahead": (Mode.ON_DEMAND, "gate"),
    "no prefetch": (Mode.SPECTER, "none"),
    "Specter": (Mode.SPECTER, "auto"),
}
BASELINES = ("on demand", "gate look-ahead")
# Before a speculating arm is timed it gets replies to learn, and where the draft may be parked some more to measure it, decoding
# without it, and it again.
_LEARNING, _DECIDING, _SETTLING_TOKENS = 2, 3, 56


@dataclass
class Arm:
    """One way of decoding at one memory and place, measured once in every repeat."""

    memory: str
    place: str
    name: str
    seconds: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)  # drafts a window
    recall: list[float] = field(default_factory=list)
    parked: list[bool] = field(default_factory=list)
    least_s: float | None = None  # no schedule takes less time a token in this memory with this draft


def run_specter(
    name: str, store: Path, repeats: int, tokens: int, warm_up: int, memories=MEMORIES, ratios=RATIOS, bits: int = 4,
    depth: str | int = "auto",
) -> dict:  # fmt: skip
    """The sweep: every memory, on the disk and over links of all `ratios`. depth: of the windows, chosen by itself or fixed."""
    config = EngineConfig(model=str(store), context=512, device="cpu", draft_bits=bits, depth=depth)
    points, bandwidths, compute = [], [], []
    info = read_info(store)
    with Engine(config) as engine:
        engine.configure(expert_memory="100%", prefetch="none")
        engine.settle()
        for repeat in range(repeats):
            compute.append(reply(engine, repeat, tokens, warm_up).seconds)
    alone = statistics.median(compute)
    moved = {}
    for memory in memories:
        bandwidths.append(raw_bandwidth(store / info.experts_file, info.layout.record_bytes, config.read_threads))
        arms = _point(config, memory, "disk", repeats, tokens, warm_up)
        moved[memory] = statistics.median(arms[0].bytes_per_token)
        points += arms
    for memory in memories:
        for ratio in ratios:
            link = replace(config, emulated_link=int(moved[memory] / (ratio * alone)))
            points += _point(link, memory, f"link, ratio {ratio:g}", repeats, tokens, warm_up)
    print_table(f"{name}, draft of {bits} bits; computing alone {alone * 1e3:.0f} ms a token", rows(points))
    return {"benchmark": "specter", "model": name, "machine": machine(), "tokens": tokens, "warm_up": warm_up,
            "draft_bits": bits, "depth": depth, "draft_bytes": draft_bytes(info, bits), "expert_bytes": info.expert_bytes_total,
            "compute_seconds_per_token": compute, "raw_bandwidth": bandwidths, "points": [asdict(p) for p in points]}  # fmt: skip


def _point(config: EngineConfig, memory: str, place: str, repeats: int, tokens: int, warm_up: int) -> list[Arm]:
    """Every arm at one memory and place, in an engine of its own, so that what it has learnt stays from repeat to repeat."""
    arms = [Arm(memory, place, name) for name in ARMS]
    with ExitStack() as engines:
        pairs = []
        for arm in arms:
            mode, prefetch = ARMS[arm.name]
            settings = replace(config, expert_memory=memory, mode=mode, prefetch=prefetch)
            parks = arm.name == "Specter" and config.depth == "auto"
            pairs.append((engines.enter_context(settled(settings, repeats, parks)), arm))
        alternate(pairs, repeats, tokens, warm_up)
    figures = ", ".join(f"{a.name} {statistics.median(a.seconds) * 1e3:.0f} ms" for a in arms)
    print(f"{memory}, {place}: {figures}", flush=True)  # all the points take a while
    return arms


def settled(config: EngineConfig, repeats: int, parks: bool = False, change: Callable[[Engine], None] | None = None) -> Engine:
    """An engine that has learnt what it learns, by replies to other prompts than those of the repeats.

    parks: whether it may park its draft; change: what is changed of it first.
    """
    engine = Engine(config)
    engine.parking.allowed = parks
    if change is not None:
        change(engine)
    learns = config.mode is Mode.SPECTER and config.depth == "auto"
    for settling in range(_LEARNING * learns + _DECIDING * parks):
        reply(engine, repeats + settling, _SETTLING_TOKENS, 0)
    return engine


def alternate(pairs: list[tuple[Engine, Arm]], repeats: int, tokens: int, warm_up: int) -> None:
    """Measure every arm by its engine once in every repeat."""
    for repeat in range(repeats):
        for engine, arm in pairs:
            _record(engine, arm, reply(engine, repeat, tokens, warm_up))


def reply(engine: Engine, prompt: int, tokens: int, warm_up: int) -> Timed:
    """Time the decoding of `tokens` tokens of prompt number `prompt`, after one of `warm_up` tokens of the one before it."""
    before, ids = (encode(engine, PROMPTS[number % len(PROMPTS)][1]) for number in (prompt - 1, prompt))
    if warm_up:
        complete(engine, before, GenerationConfig(max_tokens=warm_up, temperature=0))
    return timed(engine, ids, GenerationConfig(max_tokens=tokens, temperature=0))


def encode(engine: Engine, prompt: str) -> list[int]:
    """Token ids of `prompt`; a synthetic store, whose tokenizer knows none of its words, gets some."""
    return engine.encode_chat([{"role": "user", "content": prompt}]) or list(range(100, 108))


def _record(engine: Engine, arm: Arm, result: Timed) -> None:
    stats = result.stats
    arm.seconds.append(result.seconds)
    arm.bytes_per_token.append(result.bytes_per_token)
    arm.stall_s.append(result.stall_s)
    arm.parked.append(stats.draft_parked)
    if stats.mean_accepted is not None and not stats.draft_parked:
        arm.accepted.append(stats.mean_accepted)
        arm.recall.append(stats.forecast_recall or 0.0)
        arm.least_s = least_seconds(engine)


def least_seconds(engine: Engine) -> float:
    """A bound on the seconds a token with the draft in memory, over all depths, from what the governor measured.

    When drafting ends no more than the slots can be in place, so of the U experts that a window's verification runs at least
    U - slots move while it runs: a window takes at least k draft tokens and those transfers, computing left out.
    """
    known = engine.governor.measured()
    bounds = [(k * known.draft_s + max(0.0, union - engine.tier.arena.slots) * known.fetch_s) / tokens
              for k, (union, tokens) in enumerate(zip(known.unions, known.tokens, strict=True))]  # fmt: skip
    return min(bounds)


def baseline(points: list[Arm], arm: Arm) -> list[float]:
    """Seconds a token, repeat by repeat, of the faster baseline at the point where `arm` was measured."""
    there = [p.seconds for p in points if (p.memory, p.place) == (arm.memory, arm.place) and p.name in BASELINES]
    return min(there, key=statistics.median)


def rows(points: list[Arm]) -> list[dict]:
    return [_row(arm, baseline(points, arm)) for arm in points]


def _row(arm: Arm, best: list[float]) -> dict:
    """best: seconds a token of the faster baseline."""
    return {
        "memory": arm.memory,
        "place": arm.place,
        "arm": arm.name,
        "TPOT ms": Spread.of([s * 1e3 for s in arm.seconds]),
        "x best baseline": Spread.of(speed_up(best, arm.seconds)),
        "accepted": f"{statistics.median(arm.accepted):.1f}" if arm.accepted else "",
        "recall": f"{statistics.median(arm.recall):.2f}" if arm.recall else "",
        "parked": f"{sum(arm.parked)}/{len(arm.parked)}" if arm.name == "Specter" else "",
        "at most": f"{statistics.median(best) / arm.least_s:.2f}" if arm.least_s else "",  # 0 bounds nothing
        "MB/token": f"{statistics.median(arm.bytes_per_token) / 1e6:.1f}",
    }
