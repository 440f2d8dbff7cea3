"""A draft keeps its memory only while that makes decoding faster: both ways are measured, and the faster one stays.

A parked draft is not in memory, and its bytes hold experts instead: at depth 0 with the draft in memory decoding would be slower
than on demand in the same memory. Changing empties the slots, so it is done between replies, and seldom.
"""

from __future__ import annotations

_LEAST = 12  # tokens of a reply from which its speed is believed
_NEWEST = 0.5  # weight of the newest reply
_MARGIN = 0.95  # the other way must have taken less than this share of the time
_PAUSE, _PAUSE_MOST = 16, 256  # replies between two looks at the slower way, and the most of them


class Parking:
    """Decides after each reply. `parked`: whether the draft is out of memory now; allowed: whether it ever may be."""

    def __init__(self, allowed: bool) -> None:
        self.allowed, self.parked = allowed, False
        self._seconds: dict[bool, float] = {}  # parked -> seconds a token
        self._since = 0
        self._pause = _PAUSE

    def decide(self, seconds: float | None) -> bool:
        """Whether the next reply should be decoded without a draft, after one of `seconds` a token; None: not known yet."""
        if seconds is None or not self.allowed:
            return self.parked
        before = self._seconds.get(self.parked, seconds)
        self._seconds[self.parked] = before + (seconds - before) * _NEWEST
        self._since += 1
        other = self._seconds.get(not self.parked)
        if other is None or other < _MARGIN * self._seconds[self.parked]:
            self._change()
        elif self._since > self._pause:
            self._pause = min(2 * self._pause, _PAUSE_MOST)
            del self._seconds[not self.parked]  # too old to be believed
            self._change()
        return self.parked

    def _change(self) -> None:
        self.parked, self._since = not self.parked, 0


def pace(first: float, last: float, tokens: int) -> float | None:
    """Seconds a token of a reply whose `tokens` tokens came from time `first` to `last`; None where they were too few."""
    return (last - first) / (tokens - 1) if tokens >= _LEAST else None
