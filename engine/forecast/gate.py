"""Gate look-ahead asks the next layer's own router about this layer's MoE input: a forecast only, it never changes
routing.

The residual stream changes little from one layer to the next, so most of the next layer's experts are named a layer
early
and their reads run behind this layer's computation (Eliseev and Mazur, "Fast inference of MoE language models with
offloading", 2023, section 3.2).
"""

from __future__ import annotations

import time

import torch

from engine.decode.trial import Trial
from engine.model.router import RouterSeam, Routing, routed_ids
from engine.residency.tier import Tier


class DemandForecast:
    """No forecast: as soon as a layer's routing is known its reads begin, before the block gets to its experts."""

    prefetch = "none"  # who is asked for what a router has not said yet: `none`, or the next layer's `gate`
    fresh = 0  # tokens at the end of a prompt that it has to see computed, even if they are known

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.seams: list[RouterSeam] = []  # in layer order, given after they are installed

    def reset(self) -> None:
        """A request begins."""

    def on_forward(self, decoding: bool) -> None:
        """A forward begins: of one decoded token, or of a piece of the prompt."""

    def routing(self, layer: int) -> Routing | None:
        """None: every layer keeps its own router."""
        return None

    def keys(self, layer: int, ids: torch.Tensor) -> list[int]:
        """Tier keys of the distinct experts in `ids` [n, k], ascending."""
        base, experts = layer * self.tier.experts, self.tier.experts
        return [base + i for i in sorted(set(ids.flatten().tolist())) if i < experts]

    def on_routed(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        self.tier.begin(self.keys(layer, ids))


class GateLookahead(DemandForecast):
    """Also prefetches for the next layer."""

    prefetch = "gate"

    def on_routed(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        super().on_routed(layer, moe_input, ids)
        self.look_beyond(layer, moe_input)

    def look_beyond(self, layer: int, moe_input: torch.Tensor) -> None:
        """Look ahead to what follows `layer`, where it has a router of its own."""
        if layer + 1 < len(self.seams) and self.routing(layer + 1) is None:
            self.look_ahead(layer + 1, moe_input)

    def look_ahead(self, layer: int, moe_input: torch.Tensor) -> None:
        """Prefetch what the router of `layer`, the next to come, says about this layer's input."""
        following = self.seams[layer]
        if following.extra is None or not all(self._is_bias(extra) for extra in following.extra):
            return  # that router needs more than can be known here, such as token ids
        forecast = routed_ids(following.inner(moe_input, *following.extra))
        self.tier.prefetch(self.keys(layer, forecast), deadline=self.tier.clock + 2)

    def _is_bias(self, extra: object) -> bool:
        return isinstance(extra, torch.Tensor) and extra.numel() == self.tier.experts


class TrialLookahead(GateLookahead):
    """Looks ahead by the gates where that was found faster. The time of a token is that between two decoding forwards."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._trial = Trial()
        self._last: float | None = None

    @property
    def prefetch(self) -> str:
        return "gate" if self._trial.now else "none"

    def reset(self) -> None:
        """A request begins: what passed since the last one is no token's time."""
        self._last = None

    def on_forward(self, decoding: bool) -> None:
        now = time.perf_counter()
        if decoding and self._last is not None:
            self._trial.add(now - self._last)
        self._last = now if decoding else None

    def look_beyond(self, layer: int, moe_input: torch.Tensor) -> None:
        if self._trial.now:
            super().look_beyond(layer, moe_input)
