"""The ledger counts what the engine holds, in bytes by kind; peak active memory is the high-water mark of the sum."""

from __future__ import annotations

import threading

KINDS = ("resident", "experts", "draft", "kv", "scratch", "adapters")


class Ledger:
    """Bytes by kind. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(KINDS, 0)
        self._peak = 0

    def set(self, kind: str, size: int) -> None:
        """`kind` now takes `size` bytes."""
        with self._lock:
            self._bytes[kind] = size
            self._peak = max(self._peak, sum(self._bytes.values()))

    def by_kind(self) -> dict[str, int]:
        with self._lock:
            return dict(self._bytes)

    @property
    def active(self) -> int:
        """Bytes held now."""
        with self._lock:
            return sum(self._bytes.values())

    @property
    def peak(self) -> int:
        """Most bytes held at one time since the last reset."""
        return self._peak

    def reset_peak(self) -> None:
        with self._lock:
            self._peak = sum(self._bytes.values())
