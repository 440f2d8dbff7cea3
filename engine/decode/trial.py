"""Whether fetching early pays is measured while decoding: both ways take turns of a few tokens, and the faster one goes on.

Neither changes a token, so a trial costs nothing but the slower way's time. Which is faster depends on the place and the model:
what is fetched early is not waited for, but it takes part of the processor, and so does what names it, sometimes in vain.
"""

from __future__ import annotations

import statistics

_TURN = 8  # tokens of a turn, beside its first step, on which the turn before still tells
_TURNS = 3  # of each way, before one is chosen
_PAUSE, _PAUSE_MOST = 32, 512  # turns' tokens between two trials, and the most of them


class Trial:
    """Which of two ways, True or False, the next step is taken in, from the seconds that each took for its tokens."""

    def __init__(self, turn: int = _TURN) -> None:
        self.now = True
        self._length, self._pause = turn, _PAUSE
        self._left = 0  # tokens until the next trial; 0 during one
        self._begin()

    def add(self, seconds: float, tokens: int = 1) -> None:
        """A step was taken in the present way."""
        if self._left:
            self._left = max(0, self._left - tokens)
            if not self._left:
                self._begin()
            return
        if self._fresh:
            self._fresh = False
            return
        self._seconds += seconds
        self._tokens += tokens
        if self._tokens < self._length:
            return
        self._paces[self.now].append(self._seconds / self._tokens)
        if min(map(len, self._paces.values())) < _TURNS:
            self.now = not self.now
            self._turn()
            return
        self.now = min(self._paces, key=lambda way: statistics.median(self._paces[way]))
        self._left, self._pause = self._pause * self._length, min(2 * self._pause, _PAUSE_MOST)

    def _begin(self) -> None:
        self._paces: dict[bool, list[float]] = {True: [], False: []}
        self._turn()

    def _turn(self) -> None:
        self._fresh, self._seconds, self._tokens = True, 0.0, 0
