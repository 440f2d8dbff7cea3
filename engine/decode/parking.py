"""A draft keeps its memory only while that makes decoding faster: both ways are measured, and the faster one stays.

A parked draft is not in memory, and its bytes hold experts instead: at depth 0 with the draft in memory decoding would be slower
than on demand in the same memory. Changing empties the slots, so it is done between replies, and seldom. While a draft is first
used its governor still learns: what that took is not what drafting takes, so it is measured once more before they are compared.
"""

from __future__ import annotations

_LEAST, _MOST = 48, 256  # tokens from which a way's speed is believed, and so many of which are remembered
_MARGIN = 0.95  # the other way must have taken less than this share of the time
_PAUSE, _PAUSE_MOST = 16, 256  # replies between two looks at the slower way, and the most of them


class Parking:
    """Decides after each reply. `parked`: whether the draft is out of memory now; allowed: whether it ever may be."""

    def __init__(self, allowed: bool) -> None:
        self.allowed, self.parked = allowed, False
        self._spent: dict[bool, tuple[float, float]] = {}  # parked -> seconds, tokens
        self._since, self._learnt = 0, False
        self._pause = _PAUSE

    def decide(self, seconds: float, tokens: float) -> bool:
        """Whether the next reply should be decoded without a draft, after one whose `tokens` tokens took `seconds`."""
        if not self.allowed:
            return self.parked
        before = self._spent.get(self.parked, (0.0, 0.0))
        seconds, tokens = before[0] + seconds, before[1] + tokens
        share = min(1.0, _MOST / max(1.0, tokens))
        self._spent[self.parked] = seconds * share, tokens * share
        self._since += 1
        mine, other = self._pace(self.parked), self._pace(not self.parked)
        if mine is None:
            return self.parked
        if other is None or other < _MARGIN * mine:
            self._change()
        elif self._since > self._pause:
            self._pause = min(2 * self._pause, _PAUSE_MOST)
            del self._spent[not self.parked]  # too old to be believed
            self._change()
        return self.parked

    def _pace(self, parked: bool) -> float | None:
        """Seconds a token of one way; None while too little is known of it."""
        seconds, tokens = self._spent.get(parked, (0.0, 0.0))
        return seconds / tokens if tokens >= _LEAST else None

    def _change(self) -> None:
        if not self._learnt:
            self._learnt = True
            del self._spent[False]
        self.parked, self._since = not self.parked, 0
