"""The expert that gives way is the one whose next use is expected last.

Layers are visited in a circle, so a layer's next visit is known; whether an expert is used at a visit is estimated by its
decayed count of uses over its layer's decayed count of visits. Every count decays, used or not: the count at time t is the sum
over past times t_i of 2^(-(t - t_i) / half_life), frequency and recency in one number (Lee et al., "LRFU: a spectrum of
policies", IEEE Trans. Computers 50(12), 2001, section 2). Kept as log2 of the sum of 2^(t_i / half_life), it needs no update
for experts that are not used, and it outlives eviction.

The circle matters: among experts that are used alike, least recently used is needed soonest, and evicting it finds nothing.
"""

from __future__ import annotations

import numpy as np


class Lfru:
    """Counts of `layers` x `experts` experts, named by key = layer * experts + expert. half_life in steps of `now`."""

    def __init__(self, layers: int, experts: int, half_life: float) -> None:
        self.layers, self.experts, self.half_life = layers, experts, half_life
        self.score = np.full(layers * experts, -np.inf)
        self._visits = np.full(layers, -np.inf)
        self._layer = 0
        self._layer_of = np.repeat(np.arange(layers), experts)

    def at(self, layer: int) -> None:
        """Layer `layer` is being visited."""
        self._layer = layer

    def touch(self, keys: list[int], now: int) -> None:
        """The experts `keys` of one layer, each at most once, are used at time `now`."""
        if not keys:
            return
        layer = self._layer = keys[0] // self.experts
        self.score[keys] = np.logaddexp2(self.score[keys], now / self.half_life)
        self._visits[layer] = np.logaddexp2(self._visits[layer], now / self.half_life)

    def victim(self, slots: np.ndarray, key_of: np.ndarray) -> int:
        """Of the candidate `slots` [n] int, holding experts `key_of[slots]`, the one to give up."""
        keys = key_of[slots]
        layers = self._layer_of[keys]
        ahead = (layers - self._layer - 1) % self.layers + 1  # steps to the layer's next visit, a round for this one's
        with np.errstate(invalid="ignore"):  # an expert of a layer never visited: -inf - -inf, the last to be used
            visits_to_use = np.exp2(self._visits[layers] - self.score[keys])
        expected = np.nan_to_num(ahead + self.layers * (visits_to_use - 1), nan=np.inf, posinf=np.inf)
        return int(slots[np.argmax(expected)])
