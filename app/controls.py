"""What the controls hold becomes the engine's settings here, and a value that cannot be used one clear error."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import Plan

MIB = 2**20


def generation_config(backend: Any, temperature: float, top_k: float, top_p: float, min_p: float, penalty: float,
                      max_tokens: float | None, seed: str, stop: str) -> Any:  # fmt: skip
    """GenerationConfig from what the controls hold. Raises ConfigError for a value that cannot be used."""
    if not re.fullmatch(r"\s*[0-9]*\s*", seed or ""):
        raise backend.ConfigError(f"seed '{seed}' is not a whole number: write one, or nothing for a random seed")
    return backend.GenerationConfig(
        max_tokens=int(max_tokens or 0), temperature=float(temperature), top_k=int(top_k), top_p=float(top_p),
        min_p=float(min_p), repetition_penalty=float(penalty), seed=int(seed) if (seed or "").strip() else None,
        stop=tuple(line for line in (stop or "").splitlines() if line),
    )  # fmt: skip


def memory_range(plan: Plan) -> tuple[int, int, int]:
    """(least, present, most) expert memory in whole MiB, for the slider."""
    least, most = (-(-size // MIB) for size in (plan.min_expert_bytes, plan.max_expert_bytes))
    return least, min(max(round(plan.expert_budget_bytes / MIB), least), most), most


@dataclass
class Panel:
    """One page's side of the settings: what it was last told, so that it is told only what has changed since, and how its
    memory slider moves, which is left in the hand that moves it."""

    model: tuple[str, int] | None = None  # name and context
    memory: int | None = None  # MiB
    moves: int = 0
    rests: float = 0.0  # when the slider will have been at rest for long enough, by time.monotonic()

    def move(self) -> int:
        self.moves += 1
        self.rests = time.monotonic() + 1.5
        return self.moves

    def to_tell(self, memory: int, shown: float | None, asked: bool) -> dict[str, int]:
        """`value=memory` for a slider that shows `shown`; nothing where it agrees, or where a person was there last.
        asked: whether another budget is asked for and not settled."""
        if asked or time.monotonic() < self.rests:
            return {}
        told, self.memory = self.memory, memory
        return {} if memory in (told, shown) else {"value": memory}
