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

import numpy as np
import torch

from engine.bench.measure import Spread, Timed, complete, machine, print_table, raw_bandwidth, said, speed_up, timed
from engine.bench.prompts import PROMPTS
from engine.config import EngineConfig, GenerationConfig, Mode
from engine.engine import Engine
from engine.forecast.draft import Scheduling
from engine.residency.policy import Lfru
from engine.store.draft import draft_bytes
from engine.store.layout import read_info

MEMORIES = ("35%", "45%", "60%")
RATIOS = (1.0, 2.0, 4.0, 8.0)
# Arm -> mode, prefetch, depth. `Specter` is what a person gets: depth and, between replies, parking are chosen by itself.
ARMS = {
    "on demand": (Mode.ON_DEMAND, "none", "auto"),
    "gate look-ahead": (Mode.ON_DEMAND, "gate", "auto"),
    "no prefetch": (Mode.SPECTER, "none", "auto"),
    "Specter": (Mode.SPECTER, "auto", "auto"),
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
    name: str, store: Path, repeats: int, tokens: int, warm_up: int, memories=MEMORIES, ratios=RATIOS, bits: int = 4
) -> dict:
    """The sweep: every memory, on the disk and over links of all `ratios`."""
    config = EngineConfig(model=str(store), context=512, device="cpu", draft_bits=bits)
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
            "draft_bits": bits, "draft_bytes": draft_bytes(info, bits), "expert_bytes": info.expert_bytes_total,
            "compute_seconds_per_token": compute, "raw_bandwidth": bandwidths, "points": [asdict(p) for p in points]}  # fmt: skip


def _point(config: EngineConfig, memory: str, place: str, repeats: int, tokens: int, warm_up: int) -> list[Arm]:
    """Every arm at one memory and place, in an engine of its own, so that what it has learnt stays from repeat to repeat."""
    arms = [Arm(memory, place, name) for name in ARMS]
    with ExitStack() as engines:
        pairs = []
        for arm in arms:
            mode, prefetch, depth = ARMS[arm.name]
            settings = replace(config, expert_memory=memory, mode=mode, prefetch=prefetch, depth=depth)
            pairs.append((engines.enter_context(_settled(settings, repeats, parks=arm.name == "Specter")), arm))
        _alternate(pairs, repeats, tokens, warm_up)
    figures = ", ".join(f"{a.name} {statistics.median(a.seconds) * 1e3:.0f} ms" for a in arms)
    print(f"{memory}, {place}: {figures}", flush=True)  # all the points take a while
    return arms


def _settled(config: EngineConfig, repeats: int, parks: bool = False, change: Callable[[Engine], None] | None = None) -> Engine:
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


def _alternate(pairs: list[tuple[Engine, Arm]], repeats: int, tokens: int, warm_up: int) -> None:
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


# -- ablations --------------------------------------------------------------------------------------------------------


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


# -- fidelity ---------------------------------------------------------------------------------------------------------

TEMPERATURES = (0.0, 0.7, 1.0)


def run_fidelity(name: str, store: Path, tokens: int, bits: tuple[int, ...], depth: int = 8) -> dict:
    """How like the target each draft is, by kind of prompt and by temperature, everything resident, at a fixed depth.

    same sets: share of (token, layer) at which draft and target route the same tokens to the same experts; overlap: mean share
    of the target's experts that the draft names there; recall: the same for the experts of whole windows.
    """
    config = EngineConfig(model=str(store), context=512, device="cpu", mode=Mode.SPECTER, depth=depth, draft_bits=bits[0])
    cells = []
    with Engine(config) as engine:
        for draft_bits in bits:
            engine.configure(draft_bits=draft_bits)
            for kind, prompt in PROMPTS[: len(PROMPTS) // 2]:
                ids = encode(engine, prompt)
                for temperature in TEMPERATURES:
                    settings = GenerationConfig(max_tokens=tokens, temperature=temperature, seed=1)
                    reply_ids = said(engine, ids, settings)
                    stats = engine.stats()
                    same, overlap = _likeness(engine, ids + reply_ids, len(ids))
                    cells.append({"bits": draft_bits, "kind": kind, "temperature": temperature, "same_sets": same,
                                  "overlap": overlap, "recall": stats.forecast_recall, "windows": stats.accepted_per_window,
                                  "acceptance_by_position": stats.acceptance_by_position})  # fmt: skip
    print_table(f"{name}: fidelity at depth {depth}", fidelity_rows(cells))
    return {"benchmark": "specter-fidelity", "model": name, "machine": machine(), "tokens": tokens, "depth": depth,
            "cells": cells}  # fmt: skip


def _likeness(engine: Engine, ids: list[int], start: int) -> tuple[float, float]:
    """(share of identical sets, mean overlap) of the routes of draft and target over ids[start:]."""
    routes: dict[bool, dict[int, list]] = {}
    for drafting in (False, True):
        seen = routes.setdefault(drafting, {})
        engine.trace(ids, lambda layer, _, routing, seen=seen: seen.setdefault(layer, []).append(routing.ids), drafting=drafting)
    same, overlap = [], []
    for layer, pieces in routes[False].items():
        target, draft = torch.cat(pieces)[start:], torch.cat(routes[True][layer])[start:]
        share = (target.unsqueeze(2) == draft.unsqueeze(1)).any(dim=2).float().mean(dim=1)
        same.append(float((share == 1).float().mean()))
        overlap.append(float(share.mean()))
    return statistics.mean(same), statistics.mean(overlap)


def fidelity_rows(cells: list[dict]) -> list[dict]:
    """One row for each draft and kind of prompt, the three temperatures side by side."""
    rows = []
    for bits, kind in dict.fromkeys((cell["bits"], cell["kind"]) for cell in cells):
        mine = [cell for cell in cells if (cell["bits"], cell["kind"]) == (bits, kind)]
        row = {"bits": bits, "kind": kind}
        row |= {"same sets": " ".join(f"{c['same_sets']:.2f}" for c in mine)}
        row |= {"overlap": " ".join(f"{c['overlap']:.3f}" for c in mine)}
        row |= {"recall": " ".join(f"{c['recall'] or 0:.3f}" for c in mine)}
        row |= {"accepted at 1, 2, 4, 8": " | ".join(_at(c["acceptance_by_position"], (0, 1, 3, 7)) for c in mine)}
        rows.append(row)
    return rows


def _at(shares: tuple[float, ...], positions: tuple[int, ...]) -> str:
    return " ".join(f"{shares[i]:.2f}" if i < len(shares) else "-" for i in positions)


# -- what the ablations change ----------------------------------------------------------------------------------------


def _schedule(engine: Engine, **changes) -> None:
    engine.forecast.scheduling = Scheduling(**{"fetch": "drafting", **changes})


def _use_lru(engine: Engine) -> None:
    _schedule(engine, keep=False)
    engine.tier.policy = Lru(engine.tier.layers, engine.tier.experts, engine.tier.policy.half_life)


# Ablation -> what is changed of an engine in specter mode.
FIXED = (2, 4, 8, 12, 16)
CHANGES = {
    "no prefetch": lambda engine: _schedule(engine, fetch="none"),
    "prefetch after drafting": lambda engine: _schedule(engine, fetch="after"),
    "barrier before verification": lambda engine: _schedule(engine, barrier=True),
    "LRU, window not kept": lambda engine: _use_lru(engine),
}


def run_ablations(
    name: str, store: Path, repeats: int, tokens: int, warm_up: int, memory: str, ratio: float, bits: tuple[int, ...]
) -> dict:
    """One point of the sweep, with one thing changed at a time. Nothing is parked here, and what is drafted is always fetched
    early, except where that is what is changed."""
    info = read_info(store)
    config = EngineConfig(model=str(store), expert_memory="100%", prefetch="none", context=512, device="cpu")
    with Engine(config) as engine:
        engine.settle()
        alone = statistics.median(reply(engine, r, tokens, warm_up).seconds for r in range(repeats))
        engine.configure(expert_memory=memory)
        moved = statistics.median(reply(engine, r, tokens, warm_up).bytes_per_token for r in range(repeats))
    rate = int(moved / (ratio * alone))
    arms = {"Specter": ("auto", bits[0], None)}
    arms |= {label: ("auto", bits[0], change) for label, change in CHANGES.items()}
    arms |= {f"depth {depth}": (depth, bits[0], None) for depth in FIXED}
    arms |= {f"{b}-bit draft": ("auto", b, None) for b in bits[1:]}
    points = [Arm(memory, f"link, ratio {ratio:g}", label) for label in arms]
    link = replace(config, expert_memory=memory, emulated_link=rate, mode=Mode.SPECTER, prefetch="gate")
    with ExitStack() as engines:
        pairs = []
        for arm in points:
            depth, draft_bits, change = arms[arm.name]
            engine = _settled(replace(link, depth=depth, draft_bits=draft_bits), repeats, change=change)
            pairs.append((engines.enter_context(engine), arm))
        _alternate(pairs, repeats, tokens, warm_up)
    print_table(f"{name}: ablations", ablation_rows(points))
    return {"benchmark": "specter-ablations", "model": name, "machine": machine(), "tokens": tokens, "warm_up": warm_up,
            "memory": memory, "ratio": ratio, "compute_seconds_per_token": alone,
            "draft_bytes": {str(b): draft_bytes(info, b) for b in bits}, "expert_bytes": info.expert_bytes_total,
            "points": [asdict(p) for p in points]}  # fmt: skip


def ablation_rows(points: list[Arm]) -> list[dict]:
    """TPOT of each ablation, and of Specter as it is over it, repeat by repeat."""
    whole = points[0].seconds
    return [
        {
            "ablation": arm.name,
            "TPOT ms": Spread.of([s * 1e3 for s in arm.seconds]),
            "of Specter's speed": Spread.of(speed_up(whole, arm.seconds)),
            "accepted": f"{statistics.median(arm.accepted):.1f}" if arm.accepted else "",
            "recall": f"{statistics.median(arm.recall):.3f}" if arm.recall else "",
            "stall ms": f"{statistics.median(arm.stall_s) * 1e3:.0f}",
            "MB/token": f"{statistics.median(arm.bytes_per_token) / 1e6:.1f}",
        }
        for arm in points
    ]
