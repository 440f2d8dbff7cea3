"""The governor drafts on as long as a further token is expected to pay for its time; a window of depth 0 is a candidate.

Time of a window of k drafts: k times a draft token, and verification, a linear function of its positions and of its distinct
experts, fitted to the windows so far; where they cannot tell, an expert takes what fetching it takes, as often as one is moved.
Tokens of a window: 1 + sum over i of p^i. All of these are measured while decoding, with decay. tau, the least time per token
over all k, is what a token is worth: at any point of a window drafting goes on if some longer window gains tokens that are worth
more than its further time (the marginal value theorem of renewal processes). How likely the tokens so far are all accepted is
judged by the draft's own confidence, calibrated by what became of such confidences before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.config import MAX_DEPTH
from engine.decode.trial import Trial

_NEWEST = 0.15  # weight of the newest window in what is measured
_KEPT = 0.97  # of the calibration and the acceptances at every window
_BINS = 10
_DEPTHS = np.arange(MAX_DEPTH + 1)
_FIRST = (4, 0, 8, 16)  # depths of the first windows, before anything is known
_LOST = 1.3  # drafting takes so many times plain decoding's time: the first windows need not go on to find out
_TURN = 32  # positions of a turn, in a trial of fetching early
_EXPLORE, _EXPLORE_MOST = 24, 384  # windows between two looks at what is not chosen, and the most of them


@dataclass(frozen=True)
class Window:
    """What a window did and took, in seconds; verify_s includes waiting for experts."""

    proposed: int
    accepted: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Cost:
    """What the experts of a window cost. experts: distinct (layer, expert) that verification ran; fetched: how many were moved
    since the window before; fetch_s: seconds that moving one takes; unions[j]: distinct experts that the first j + 1 drafted
    positions named."""

    experts: int
    fetched: float
    fetch_s: float
    unions: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """What a governor knows by depth 0 .. MAX_DEPTH: unions, distinct experts of a window; tokens, expected of it."""

    draft_s: float
    fetch_s: float
    unions: tuple[float, ...]
    tokens: tuple[float, ...]


class Governor:
    """Depths of windows. fixed: the depth of all of them, or None to choose. total: experts of the model, all layers'."""

    def __init__(self, fixed: int | None, total: int) -> None:
        self.fixed, self.total = fixed, total
        self.now = fixed or 0  # depth of the present window
        self.windows = 0
        self._first = list(_FIRST)  # still to come
        self._early = Trial(_TURN)
        self._spent_s, self._spent_tokens = 0.0, 0  # of windows that were no look around, since `spent` was asked last
        self._until_look, self._pause = _EXPLORE, _EXPLORE
        self._looking: int | None = None
        self._draft_s = 0.0  # of one draft token
        self._accepted, self._checked = 3.2, 4.0  # drafts after accepted ones, with decay
        self._unions = np.zeros(MAX_DEPTH + 1)  # distinct experts of 1 + i positions
        self._missing = 1.0  # share of a window's experts that are moved
        self._fetch_s = 0.0
        self._normal, self._moment = np.zeros((3, 3)), np.zeros(3)  # of the least squares on 1, positions and experts
        self._plain_s: float | None = None  # of a window of depth 0
        # Draft and target are nearly one model: they often agree where both are unsure. Until it is seen otherwise:
        self._likely = 0.6 + 0.4 * (np.arange(_BINS) + 0.5) / _BINS
        self._seen, self._hits = np.full(_BINS, 2.0), 2 * self._likely
        self._times = np.zeros(MAX_DEPTH + 1)
        self._best, self._tau = 0, 0.0  # the depth of the least time per token, and that time
        self._reach = 1.0  # how likely everything drafted so far is accepted
        self._confidences: list[float] = []

    def depth(self, most: int) -> int:
        """Drafts that the coming window may have, at most `most`."""
        self._reach, self._confidences = 1.0, []
        if self.fixed is not None:
            self.now = min(self.fixed, most)
            return self.now
        if self._first:
            self._looking = min(self._first[0], most)
        elif self._until_look <= 0:
            self._looking = min(0 if self._best else 4, most)
        else:
            self._looking = None
        if self._looking is not None:
            self.now = self._looking
        else:
            self.now = min(most, MAX_DEPTH) if self._best else 0  # `go_on` ends it
        return self.now

    def go_on(self, drafted: int, confidence: float) -> bool:
        """Whether to draft a further token after `drafted` ones; `confidence` is the draft's own odds of the last."""
        self._confidences.append(confidence)
        if self.fixed is not None or self._looking is not None:
            return True
        i = self._bin(confidence)
        self._reach *= self._hits[i] / self._seen[i]
        longer = np.arange(drafted + 1, self.now + 1)
        gained = self._reach * self._expected(longer - drafted)
        return bool(np.any(gained * self._tau > self._times[longer] - self._times[drafted]))

    def learn(self, window: Window, cost: Cost) -> None:
        """A window has ended."""
        self.windows += 1
        self._until_look -= 1
        tau = self._tau
        k, weight = window.proposed, max(_NEWEST, 1 / self.windows)
        if self._looking is None:
            self._spent_s += window.draft_s + window.verify_s
            self._spent_tokens += window.accepted + 1
        if k:
            # By the time of a position, which does not hang on how many of them were accepted.
            self._early.add(window.draft_s + window.verify_s, 1 + k)
            self._draft_s += (window.draft_s / k - self._draft_s) * (weight if self._draft_s else 1)
            checked = min(window.accepted + 1, k)
            self._accepted = self._accepted * _KEPT + window.accepted
            self._checked = self._checked * _KEPT + checked
            self._calibrate(window, checked)
        else:
            before = window.verify_s if self._plain_s is None else self._plain_s
            surprise = abs(window.verify_s - before) > 0.2 * before
            # A look is rare: where it finds something new, what was known before is worth little, and the next one comes soon.
            self._plain_s = before + (window.verify_s - before) * (0.5 if surprise else _NEWEST)
            self._pause = _EXPLORE // 2 if surprise and self._looking == 0 else self._pause
        for i, union in enumerate((*cost.unions, cost.experts)[: MAX_DEPTH + 1]):
            self._unions[i] += (union - self._unions[i]) * (weight if self._unions[i] else 1)
        self._missing += (cost.fetched / max(1, cost.experts) - self._missing) * weight
        if cost.fetch_s:
            self._fetch_s = cost.fetch_s
        features = np.array([1.0, 1 + k, cost.experts])
        self._normal = self._normal * _KEPT + np.outer(features, features)
        self._moment = self._moment * _KEPT + features * window.verify_s
        self._estimate()
        if self._first:
            self._begin()
        elif self._looking is not None:
            found = bool(self._best) == bool(self._looking)  # what was looked at is the better way now
            self._pause = min(2 * (_EXPLORE if found else self._pause), _EXPLORE_MOST)
            # It was faster just now, and what was known before says otherwise: one more look, at once.
            promising = not found and (window.draft_s + window.verify_s) / (1 + window.accepted) < tau
            self._until_look = 0 if promising else self._pause

    def _begin(self) -> None:
        """One of the first windows has ended."""
        self._first.pop(0)
        if self._plain_s is not None and self._times[4] > _LOST * self._tau * (1 + self._expected(4)):
            self._first = []

    @property
    def early(self) -> bool:
        """Whether what the coming window's drafts name is fetched while drafting, rather than when it is verified."""
        return self._early.now

    def spent(self) -> tuple[float, int]:
        """(seconds, tokens) of the windows that were no look around, since this was asked last."""
        result = self._spent_s, self._spent_tokens
        self._spent_s, self._spent_tokens = 0.0, 0
        return result

    def measured(self) -> Measured:
        """What is known now."""
        return Measured(self._draft_s, self._fetch_s, tuple(self._all_unions()), tuple(1 + self._expected(_DEPTHS)))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _expected(self, drafts: np.ndarray | int) -> np.ndarray | float:
        """Tokens accepted of so many drafts: the sum of p^i."""
        p = min(self._accepted / self._checked, 0.99)
        return p * (1 - p**drafts) / (1 - p)

    def _estimate(self) -> None:
        """Time of a window for every depth, and where the least time per token is."""
        unions = self._all_unions()
        ridge = np.array([1e-2, 1e-1, 1e-2 * max(1.0, self._normal[2, 2])])  # keeps what windows alike cannot tell apart sane
        guess = np.array([0.0, 0.0, self._missing * self._fetch_s])
        weights = np.linalg.solve(self._normal + np.diag(ridge), self._moment + ridge * guess)
        verify = np.stack((np.ones_like(_DEPTHS), 1 + _DEPTHS, unions), axis=1) @ np.maximum(weights, 0.0)
        self._times = _DEPTHS * self._draft_s + verify
        if self._plain_s is not None:
            self._times[0] = self._plain_s
        per_token = self._times / (1 + self._expected(_DEPTHS))
        self._best = int(np.argmin(per_token))
        self._tau = float(per_token[self._best])

    def _all_unions(self) -> np.ndarray:
        """Distinct experts of windows of all depths; those that were never seen grow on as the last ones did."""
        unions = self._unions.copy()
        known = int(np.count_nonzero(unions))
        slope = unions[known - 1] - unions[known - 2] if known > 1 else 0.0
        unions[known:] = unions[known - 1] + slope * np.arange(1, len(unions) - known + 1)
        return np.minimum(unions, self.total)

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * _BINS), _BINS - 1)

    def _calibrate(self, window: Window, checked: int) -> None:
        self._hits += (1 - _KEPT) * (2 * self._likely - self._hits)
        self._seen += (1 - _KEPT) * (2 - self._seen)
        for i, confidence in enumerate(self._confidences[:checked]):
            self._hits[self._bin(confidence)] += i < window.accepted
            self._seen[self._bin(confidence)] += 1
