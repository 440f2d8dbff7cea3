"""The draft's routes are the forecast: what it names is kept or fetched for the layer that will verify it, and nothing else.

Routes are observed until the last draft token; of an expert it matters that it was named, and where: layers are verified in
order, so a layer's number is its deadline. While drafting goes on no more is fetched than the link can move before it may end;
the rest follows in the order of deadlines while verification makes room. The last proposal's route is not known, and what is
used often stays for it by the tier's own policy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from engine.decode.governor import Cost
from engine.forecast.gate import GateLookahead
from engine.model.draft import Draft, begin_drafting, end_drafting
from engine.model.experts import StreamedExperts
from engine.residency.tier import Tier


@dataclass(frozen=True)
class Scheduling:
    """How the forecast is acted on; `after`, not to keep and a barrier are for ablations.

    fetch: `drafting`, `after` (nothing before drafting ends), `none`, or `auto`: `drafting` or `none`, as is said of each
    window. keep: what is named and there is not evicted before it was verified. barrier: verification waits till everything
    named has arrived, instead of expert by expert.
    """

    fetch: str = "auto"
    keep: bool = True
    barrier: bool = False


class DraftRoutes(GateLookahead):
    """Drafts with `draft` in place of the experts of `targets`, and forecasts for the windows that it drafts.

    gate: where nothing was drafted, look a layer ahead by its own router.
    """

    def __init__(
        self, tier: Tier, targets: list[StreamedExperts], draft: Draft, gate: bool, scheduling: Scheduling = Scheduling()
    ) -> None:
        super().__init__(tier)
        self.draft, self.gate, self.scheduling = draft, gate, scheduling
        self._targets = targets
        self._fetches = "none"  # how this window's routes are acted on
        self._drafting = False  # whether the model computes with the draft's experts
        self._draft_s = 0.0  # of one token, with decay
        self.reset()

    def reset(self) -> None:
        """A request begins."""
        super().reset()
        self._named: set[int] = set()  # keys that the present window's drafts were routed to
        self._unions: list[int] = []  # their number after each draft token
        self._routes: list[torch.Tensor] = []  # of the draft token under way, a layer each
        self._absent: list[tuple[int, int]] = []  # (deadline, key) of those that are not on their way yet
        self._fetched = 0
        self._used = self._foreseen = 0  # experts that verification ran, and those of them that had been named
        self._decoding = False
        self._mark()

    def on_forward(self, decoding: bool) -> None:
        """A forward begins."""
        if decoding and not self._decoding:
            self._mark()  # what the prompt cost is no window's
        self._decoding = decoding

    # -- drafting ----------------------------------------------------------------------------------------------------

    def begin(self, early: bool = True) -> None:
        """A window begins: until `end` the model computes with the draft's experts. early: whether what they name is fetched."""
        self._drafting = True
        chosen = self.scheduling.fetch
        self._fetches = ("drafting" if early else "none") if chosen == "auto" else chosen
        begin_drafting(self._targets, self.draft)
        self._began = self._last = time.perf_counter()
        self._named, self._unions, self._absent, self._fetched = set(), [], [], 0

    def drafted(self, left: int) -> None:
        """A draft token's forward has ended; at most `left` more will follow."""
        now = time.perf_counter()
        taken, self._last = now - self._last, now
        self._draft_s += (taken - self._draft_s) * (0.2 if self._draft_s else 1)
        ids = torch.stack(self._routes).tolist()  # the one transfer from the device that observing takes
        self._routes = []
        plan = []
        for layer, chosen in enumerate(ids):
            base = layer * self.tier.experts
            fresh = {base + i for i in chosen if i < self.tier.experts} - self._named
            plan += [(self.tier.clock + 1 + layer, key) for key in fresh]
            self._named |= fresh
        self._unions.append(len(self._named))
        self._absent = sorted(self._absent + self.tier.absent(plan, self.scheduling.keep))
        if self._fetches == "drafting":
            fetch_s = self.tier.fetch_s
            movable = (now - self._began + left * self._draft_s) / fetch_s if fetch_s else len(self._absent)
            self._fetch(int(movable) - self._fetched)

    def end(self) -> None:
        """The model computes with its own experts again."""
        end_drafting(self._targets)
        self._drafting, self._routes = False, []
        if self._fetches != "none":
            self._fetch(len(self._absent))
        if self.scheduling.barrier:
            self.tier.settle()

    def _fetch(self, most: int) -> None:
        """Begin fetching at most `most` absent experts, those that are needed soonest first."""
        now, self._absent = self._absent[: max(0, most)], self._absent[max(0, most) :]
        self._fetched += len(now)
        for deadline, group in groupby(now, key=itemgetter(0)):
            self.tier.prefetch([key for _, key in group], deadline)

    # -- watching ----------------------------------------------------------------------------------------------------

    def on_routed(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        if self._drafting:
            self._routes.append(ids[0])
            return
        keys = self.keys(layer, ids)
        self._window_used += len(keys)
        self.tier.begin(keys)
        if self._named:
            self._used += len(keys)
            self._foreseen += sum(key in self._named for key in keys)
        elif self.gate:
            self.look_beyond(layer, moe_input)

    @property
    def recall(self) -> float | None:
        """Share of the experts that verification ran which had been named by the draft; None before a window."""
        return self._foreseen / self._used if self._used else None

    def cost(self) -> Cost:
        """What the experts of the window that has just been verified cost."""
        moved = (self.tier.fetcher.meter.bytes - self._bytes_before) / self.tier.arena.record_bytes
        result = Cost(self._window_used, moved, self.tier.fetch_s, tuple(self._unions))
        self._named, self._unions = set(), []
        self._mark()
        return result

    def _mark(self) -> None:
        self._window_used, self._bytes_before = 0, self.tier.fetcher.meter.bytes
