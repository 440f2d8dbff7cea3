"""Every figure on the page is the engine's own, formatted here; one that is not known yet is a dash, never a zero."""

from __future__ import annotations

import base64
import time
from collections import deque
from html import escape
from typing import TYPE_CHECKING

from app.modes import MODES, mode_words
from engine import format_size

if TYPE_CHECKING:
    import numpy as np

    from app.desk import Desk
    from engine import EngineStats, Plan

STATES = ("absent", "resident", "in flight", "just hit", "just missed")  # the values of Engine.residency()
DASH = "–"
_TOGETHER = 0.01  # seconds within which tokens are one arrival: those of a verified window come at once


class Meter:
    """Tokens per second over the reply being written: at most two samples a second, the last minute of them."""

    def __init__(self, clock=time.monotonic) -> None:
        self._clock = clock
        self._arrivals: deque[list] = deque(maxlen=256)  # of the latest tokens: [time, how many]
        self._rates: deque[float] = deque(maxlen=120)
        self._sampled = 0.0

    def begin(self) -> None:
        self._arrivals.clear()
        self._rates.clear()
        self._sampled = self._clock()

    def add(self, tokens: int) -> None:
        """Note `tokens` tokens that came now. The rate is taken over 1.5 s or, when slow, over the last 5 arrivals."""
        now = self._clock()
        if self._arrivals and now - self._arrivals[-1][0] < _TOGETHER:
            self._arrivals[-1][1] += tokens
            return
        if now - self._sampled >= 0.5 and len(self._arrivals) >= 3:  # the last arrival is complete only now
            recent = [arrival for arrival in self._arrivals if now - arrival[0] <= 1.5]
            window = recent if len(recent) >= 5 else list(self._arrivals)[-5:]
            made = sum(count for _, count in window[1:])  # the first one's were made before
            self._rates.append(round(made / (window[-1][0] - window[0][0]), 2))
            self._sampled = now
        self._arrivals.append([now, tokens])

    def series(self) -> list[float]:
        return list(self._rates)


def live(desk: Desk) -> dict:
    """Everything the page redraws while it is open, small enough to ask for twice a second (about 1 byte a cell)."""
    status, turn, now = desk.status, desk.turn, desk.figures()
    writing = turn is not None
    waiting = desk.waiting
    draft = drafting(now and now.stats)
    return {
        # The engine itself may give the draft's memory away, which the plan and the chips must show.
        "version": f"{desk.version}, parked" if draft and draft["parked"] else str(desk.version),
        "phase": "writing" if writing else status.phase,
        "status": _sentence(status.phase, status.detail, writing, bool(turn and turn.text), waiting),
        "model": status.model,
        "fraction": status.fraction,
        "failure": status.detail if status.phase == "failed" else "",
        "figures": figures(now and now.stats),
        "draft": draft,
        "rates": desk.meter.series(),
        "cells": now and cells(now.residency),
    }


def _sentence(phase: str, detail: str, writing: bool, begun: bool, waiting: int) -> str:
    if writing:
        queue = f", {waiting} waiting" if waiting else ""
        return f"{'Writing' if begun else 'Reading the prompt'}{queue}"
    return {"empty": "No model", "ready": "Ready", "failed": "Not loaded"}.get(phase, detail)


def figures(stats: EngineStats | None) -> dict[str, str]:
    """The numbers panel, by name of the field; all dashes without a model."""
    if stats is None:
        return dict.fromkeys(_FIGURES, DASH) | {"memory_kind": "RAM in use"}
    return {name: make(stats) for name, make in _FIGURES.items()}


def _rate(value: float | None) -> str:
    return DASH if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _milliseconds(value: float | None) -> str:
    return DASH if value is None else f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:,.0f} ms"


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _share(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"


def _size(value: float | None) -> str:
    return DASH if value is None else format_size(value)


def _read_per_token(stats: EngineStats) -> float | None:
    return stats.bytes_read / stats.completion_tokens if stats.completion_tokens else None


def _late(stats: EngineStats) -> float | None:
    """The share of the experts asked for that came late; None where nobody looks ahead."""
    asked = stats.hits + stats.late + stats.misses
    nobody = MODES[stats.mode].ahead is None and stats.prefetch == "none"
    return None if nobody or not asked else stats.late / asked


def _in_use(stats: EngineStats) -> int:
    if stats.device_memory_bytes is not None:
        return stats.device_memory_bytes
    return sum(stats.active_bytes_by_kind.values())


_FIGURES = {
    "tok_s": lambda s: _rate(s.tok_s),
    "tpot": lambda s: _milliseconds(1 / s.tok_s if s.tok_s else None),
    "ttft": lambda s: _seconds(s.ttft_s),
    "memory": lambda s: _size(_in_use(s)),
    "memory_kind": lambda s: "RAM in use" if s.device_memory_bytes is None else "VRAM in use",
    "peak": lambda s: _size(s.peak_active_bytes),
    "rss": lambda s: _size(s.rss_bytes),
    "hit_rate": lambda s: _share(s.hit_rate),
    "hidden_io": lambda s: _share(s.hidden_io),
    "late": lambda s: _share(_late(s)),
    "agreement": lambda s: _share(s.forecast_agreement),
    "read_per_token": lambda s: _size(_read_per_token(s)),
    "prefill": lambda s: _rate(s.prefill_tok_s) + ("" if s.prefill_tok_s is None else " tok/s"),
    "asked": lambda s: f"{s.hits:,} ready, {s.late:,} late, {s.misses:,} missed",
}


def drafting(stats: EngineStats | None) -> dict | None:
    """Specter's panel: its figures by name of the field, and what its bars are drawn from; None in other modes.

    accepted: [a] = share of the windows that accepted a drafted tokens. positions: as acceptance_by_position. split: shares
    of drafting, verifying and waiting for experts in the time that windows took, or None before the first.
    """
    if stats is None or not MODES[stats.mode].draft:
        return None
    counts, windows = stats.accepted_per_window, sum(stats.accepted_per_window)
    waited = min(stats.stall_s, stats.verify_s)
    times, whole = (stats.draft_s, stats.verify_s - waited, waited), stats.draft_s + stats.verify_s
    split = [round(time / whole, 3) for time in times] if whole else None
    return {
        "figures": {
            "draft_depth": {None: DASH, 0: "0, plain"}.get(stats.draft_depth, str(stats.draft_depth)),
            "accepted": _rate(stats.mean_accepted),
            "recall": _share(stats.forecast_recall),
            "link": _LINKS[stats.link] + (", not pinned" if stats.pinned is False else ""),
            **{f"{part}_share": DASH if split is None else f"{100 * split[i]:.0f} %" for i, part in enumerate(_SPLIT)},
        },
        "parked": stats.draft_parked,
        "accepted": [round(count / windows, 3) for count in counts] if windows else [],
        "positions": [round(share, 3) for share in stats.acceptance_by_position],
        "split": split,
    }


_SPLIT = ("draft", "verify", "stall")
_LINKS = {"ssd": "SSD", "pcie": "PCIe", "emulated": "Emulated"}


def cells(residency: np.ndarray) -> dict:
    """The heat map: `rows` layers of `columns` experts, one base64 byte (an index into STATES) a cell, row by row."""
    rows, columns = residency.shape
    return {"rows": rows, "columns": columns, "states": base64.b64encode(residency.tobytes()).decode()}


def summarise(stats: EngineStats) -> dict:
    """What a reply cost, to be kept with it: the figures, and one line that says them."""
    read = _read_per_token(stats)
    parts = [f"{stats.completion_tokens} tokens", f"first after {_seconds(stats.ttft_s)}",
             f"{_rate(stats.tok_s)} tok/s", f"peak active {_size(stats.peak_active_bytes)}",
             f"read {_size(stats.bytes_read)}" + (f" ({_size(read)} per token)" if read else ""),
             mode_words(stats)]  # fmt: skip
    return {"line": " · ".join(parts), "tokens": stats.completion_tokens, "ttft_s": stats.ttft_s,
            "tok_s": stats.tok_s, "peak_active_bytes": stats.peak_active_bytes,
            "bytes_read": stats.bytes_read, "hit_rate": stats.hit_rate, "hidden_io": stats.hidden_io,
            "forecast_agreement": stats.forecast_agreement, "mode": stats.mode, "routing": stats.routing,
            "lora": stats.lora, "expert_format": stats.expert_format, **_drafted(stats)}  # fmt: skip


def _drafted(stats: EngineStats) -> dict:
    return {"draft_bits": stats.draft_bits, "accepted_per_window": list(stats.accepted_per_window),
            "forecast_recall": stats.forecast_recall} if MODES[stats.mode].draft else {}  # fmt: skip


def plan_bar(plan: Plan | None) -> str:
    """HTML: what the memory is used for, to scale, then what is left (drawn short and hatched when it is much more)."""
    if plan is None:
        return '<p class="or-aside">The plan appears once a model is loaded.</p>'
    kinds = [("weights", "Weights", plan.resident_bytes), ("experts", "Experts", _in_slots(plan)),
             ("draft", "Draft", plan.draft_bytes), ("adapter", "Adapters", plan.adapter_bytes),
             ("kv", "KV cache", plan.kv_bytes), ("scratch", "Scratch", plan.scratch_bytes)]  # fmt: skip
    kinds = [kind for kind in kinds if kind[2]]
    free = max(plan.available_bytes - plan.total_bytes, 0)
    to_scale = free <= plan.total_bytes / 2
    whole = plan.total_bytes + (free if to_scale else plan.total_bytes / 3)
    bars = [_segment(name, label, size, size / whole) for name, label, size in kinds]
    bars.append(_segment("free" if to_scale else "free cut", "Free", free, 1 - plan.total_bytes / whole))
    keys = [_key(name, label, size) for name, label, size in [*kinds, ("free", "Free", free)]]
    unfit = "" if plan.fits else " <strong>does not fit</strong>"
    return (
        f'<div class="or-bar" role="img" aria-label="Memory plan">{"".join(bars)}</div>'
        f'<div class="or-keys">{"".join(keys)}</div>'
        f"<p>{_size(plan.total_bytes)} planned of {_size(plan.available_bytes)} available{unfit}</p>"
    )


def where_experts_are(plan: Plan | None) -> str:
    """HTML: the plain reason for the plan, and the share of the experts that is in memory."""
    if plan is None:
        return ""
    disk = max(plan.expert_bytes_total - _in_slots(plan), 0)
    held = 1 - disk / plan.expert_bytes_total if plan.expert_bytes_total else 1
    return (
        f"<h4>Why it needs the disk</h4><p>{escape(why(plan))}</p>"
        f'<div class="or-bar thin" role="img" aria-label="Where the experts are">'
        f"{_segment('experts', 'In memory', _in_slots(plan), held)}"
        f"{_segment('free', 'On the disk', disk, 1 - held)}</div>"
        f'<p class="or-aside">{_size(_in_slots(plan))} of the experts in memory, '
        f"{_size(disk)} only on the disk</p>"
    )


def _in_slots(plan: Plan) -> int:
    """Bytes for the experts themselves: of the memory for experts, what a draft leaves."""
    return plan.expert_budget_bytes - plan.draft_bytes


def _segment(name: str, label: str, size: int, share: float) -> str:
    return f'<i class="or-seg {name}" style="flex:{max(share, 0):.4f}" title="{label}: {_size(size)}"></i>'


def _key(name: str, label: str, size: int) -> str:
    return f'<span><i class="or-dot {name}"></i>{label}<b>{_size(size)}</b></span>'


def why(plan: Plan) -> str:
    """Why a model with few active weights still needs room for all of them."""
    if _in_slots(plan) >= plan.expert_bytes_total:
        return (f"Each token uses {plan.top_k} of {plan.experts} experts in every layer, a different choice each time. "
                "All of them fit in the memory you gave, so nothing is read while it writes.")  # fmt: skip
    return (f"Each token uses only {plan.top_k} of {plan.experts} experts in every layer, but a different choice each "
            "time, so all of them must be within reach. Those that do not fit in memory wait on the disk and are read "
            "when they are needed; more memory means fewer reads.")  # fmt: skip
