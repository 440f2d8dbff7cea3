"""Distillation trains routers and low-rank factors together on KL(teacher ‖ student) at the reply positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from engine.train.chats import Batch, Chat
from engine.train.descent import DescentSettings, descend
from engine.train.loss import top_kl
from engine.train.student import Student


@dataclass(frozen=True)
class DistilSettings:
    """Peak learning rates, and how to descend."""

    router_lr: float = 2e-3
    healing_lr: float = 1e-3
    descent: DescentSettings = field(default_factory=DescentSettings)


def batch_loss(student: Student, chats: list[Chat]) -> Tensor:
    """KL(teacher ‖ student) at the reply positions of one right-padded batch of chats."""
    batch = Batch.of(chats)
    hidden = student.hidden(batch.ids).flatten(0, 1)[batch.positions]
    return top_kl(hidden, student.lm.lm_head.weight, batch.top_ids, batch.top_log_probs)


class _Distilled:
    """A student as `descend` sees it."""

    def __init__(self, student: Student, settings: DistilSettings) -> None:
        self._student, self._settings = student, settings
        self.trained, self.load_trained, self.changed = student.trained, student.load_trained, student.merge

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        routers = {name: p for name, p in self._student.trained().items() if name.endswith(".router")}
        rest = [p for name, p in self._student.trained().items() if name not in routers]
        return [(list(routers.values()), self._settings.router_lr), (rest, self._settings.healing_lr)]

    def loss(self, chats: list[Chat]) -> tuple[Tensor, float]:
        loss = batch_loss(self._student, chats)
        return loss, loss.item()


def distil(
    student: Student,
    chats: list[Chat],
    settings: DistilSettings,
    checkpoint: Path,
    report: Callable[[dict], None] = lambda _: None,
    stop_after: int | None = None,
) -> None:
    """One pass over `chats`, in place; see `descend` for the rest."""
    descend(_Distilled(student, settings), chats, settings.descent, checkpoint, report, stop_after)
