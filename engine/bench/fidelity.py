"""`bench specter-fidelity`: how like the target a draft routes and speaks, everything in memory; nothing here is timed."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from engine.bench.measure import machine, print_table, said
from engine.bench.prompts import PROMPTS
from engine.bench.specter import encode
from engine.config import EngineConfig, GenerationConfig, Mode
from engine.engine import Engine

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
