"""Progress of a long job is a value handed to a callback: what is being done, how far, of how much."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import OutriderError


@dataclass(frozen=True)
class Progress:
    """stage: what is being done, for people. done of total, in `unit` (`bytes`, `tensors`, `steps`)."""

    stage: str
    done: int
    total: int
    unit: str


ProgressCallback = Callable[[Progress], None]


class CancelledError(OutriderError):
    """The job was cancelled; what it had done is kept and the next run resumes."""


def check_cancelled(cancel: threading.Event | None) -> None:
    """Raise CancelledError once `cancel` is set."""
    if cancel is not None and cancel.is_set():
        raise CancelledError("cancelled; what was done is kept, and preparing the same model again resumes")
