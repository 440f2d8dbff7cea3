"""A draft keeps its memory only while that makes decoding faster: both ways are measured, and the faster one stays.

A parked draft is not in memory, and its bytes hold experts instead: at depth 0 with the draft in memory decoding would be slower
than on demand in the same memory. Changing empties the slots, so it is done between replies, and seldom. Replies differ in how
much of them is accepted, and while a draft is first used its governor still learns: drafting is visited twice before the two are
compared, and the better visit counts. Too good an opinion of drafting is corrected by drafting on; too bad a one would last.
"""

from __future__ import annotations

_LEAST, _MOST = 48, 256  # tokens from which a way's speed is believed, and so many of which are remembered
_MARGIN = 0.95  # the other way must have taken less than this share of the time
_PAUSE, _PAUSE_MOST = 300, 12_000  # tokens between two looks at the slower way, and the most of them


class Parking:
    """Decides after each reply. `parked`: whether the draft is out of memory now; allowed: whether it ever may be."""

    def __init__(self, allowed: bool) -> None:
        self.allowed, self.parked = allowed, False
        self._spent: dict[bool, tuple[float, float]] = {}  # parked -> seconds, tokens
        self._since, self._visits = 0.0, 1  # tokens since the last change, visits to drafting
        self._first: float | None = None  # seconds a token of the first visit to drafting, until the second one is over
        self._pause = _PAUSE

    def decide(self, seconds: float, tokens: float) -> bool:
        """Whether the next reply should be decoded without a draft, after one whose `tokens` tokens took `seconds`."""
        if not self.allowed:
            return self.parked
        before = self._spent.get(self.parked, (0.0, 0.0))
        self._since += tokens
        seconds, tokens = before[0] + seconds, before[1] + tokens
        share = min(1.0, _MOST / max(1.0, tokens))
        self._spent[self.parked] = seconds * share, tokens * share
        mine, other = self._pace(self.parked), self._pace(not self.parked)
        if mine is None:
            return self.parked
        if self._first is not None and not self.parked:
            mine, self._first = min(mine, self._first), None
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
        if self._visits == 1 and not self.parked:
            self._first = self._pace(False)
            del self._spent[False]
        self.parked, self._since = not self.parked, 0.0
        self._visits += not self.parked
