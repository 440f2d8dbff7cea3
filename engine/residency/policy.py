"""The expert that gives way is the one with the least decayed count of uses; every count decays, used or not.

The score of an expert at time t is the sum over its past uses t_i of 2^(-(t - t_i) / half_life): frequency and
recency in
one number (Lee et al., "LRFU: a spectrum of policies", IEEE Trans. Computers 50(12), 2001, section 2). Kept as
log2 of the sum of 2^(t_i / half_life), it needs no update for experts that are not used, and it outlives eviction.
"""

from __future__ import annotations

import numpy as np


class Lfru:
    """Scores of `keys` experts. half_life in calls of `touch` with an advanced `now`."""

    def __init__(self, keys: int, half_life: float) -> None:
        self.half_life = half_life
        self.score = np.full(keys, -np.inf)

    def touch(self, keys: list[int], now: int) -> None:
        """The experts `keys` (each at most once) are used at time `now`."""
        self.score[keys] = np.logaddexp2(self.score[keys], now / self.half_life)

    def victim(self, slots: np.ndarray, key_of: np.ndarray) -> int:
        """Of the candidate `slots` [n] int, holding experts `key_of[slots]`, the one to give up."""
        return int(slots[np.argmin(self.score[key_of[slots]])])
