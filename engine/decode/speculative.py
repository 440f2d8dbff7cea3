"""Speculation is lossless: a token is committed only if the target, with its own experts, would have chosen it.

A window: the draft says some tokens one by one on top of the target's KV cache; what it wrote there is taken back; the target
runs the last committed token and all proposals in one forward; the longest accepted beginning is committed, and one token of
the target's own after it (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, algorithm 1).
Keys and values of the draft are never kept, accepted or not. At depth 0 a window is one step of plain decoding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn

from engine.decode.governor import Governor, Window
from engine.decode.plain import Stopped, forward
from engine.decode.reuse import Conversation
from engine.decode.sampling import Sampler


class Tally:
    """What the windows of a request did. accepted[a]: windows of which a drafts were accepted; times in seconds."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.draft_s = self.verify_s = 0.0
        self._positions: list[tuple[int, int]] = []  # (accepted, checked) at each position of a window

    def add(self, window: Window) -> None:
        """A window has been verified."""
        self.draft_s += window.draft_s
        self.verify_s += window.verify_s
        self.accepted += [0] * (window.accepted + 1 - len(self.accepted))
        self.accepted[window.accepted] += 1
        checked = min(window.accepted + 1, window.proposed)  # what comes after a refused one is not looked at
        self._positions += [(0, 0)] * (checked - len(self._positions))
        for i, (accepted, seen) in enumerate(self._positions[:checked]):
            self._positions[i] = accepted + (i < window.accepted), seen + 1

    def by_position(self) -> tuple[float, ...]:
        """Share accepted at each position that was checked."""
        return tuple(accepted / seen for accepted, seen in self._positions)


class Drafter(Protocol):
    """Who makes the model draft, and gets the experts that were named."""

    def begin(self, early: bool) -> None:
        """A window begins: until `end` the model computes with the draft's experts. early: whether what they name is fetched."""

    def drafted(self, left: int) -> None:
        """A draft token's forward has ended; at most `left` more will follow."""

    def end(self) -> None:
        """The model computes with its own experts again; the proposals are about to be verified."""


def speculate(
    model: nn.Module,
    conversation: Conversation,
    logits: torch.Tensor,
    sampler: Sampler,
    history: list[int],
    limit: int,
    stop: threading.Event,
    drafter: Drafter,
    governor: Governor,
    on_window: Callable[[Window], None],
    on_forward: Callable[[int, bool], None],
) -> Iterator[int]:
    """Yield token ids without end, the first from `logits`, as `plain.decode` does; more than `limit` are not drafted for.

    on_forward(n, True) is called before each forward of n tokens, on_window after each verification. Raises Stopped between two
    draft tokens once `stop` is set.
    When the generator is closed the cache holds what was yielded, the last token aside; where it has layers that cannot be
    cropped, what it held when the window began.
    """
    token = sampler.choose(logits, history)
    history.append(token)
    said = 1
    yield token
    while True:
        depth = governor.depth(max(0, limit - said - 1))
        mark = conversation.mark() if depth else {}
        began = time.perf_counter()
        proposals, odds = _draft(model, conversation, token, depth, mark, sampler, history, stop, drafter, governor, on_forward)
        drafted = time.perf_counter()
        on_forward(1 + len(proposals), True)
        rows = forward(model, conversation, [token, *proposals], every=True)
        accepted, following = _verify(sampler, rows, proposals, odds, history)
        inputs, outputs = [token, *proposals[:accepted]], [*proposals[:accepted], following]
        _keep(model, conversation, inputs, len(proposals) - accepted, mark, on_forward)
        on_window(Window(len(proposals), accepted, drafted - began, time.perf_counter() - drafted))
        kept = 0
        try:
            for given, token in zip(inputs, outputs, strict=True):
                conversation.append([given], prefill=False)
                kept += 1
                history.append(token)
                said += 1
                yield token
        finally:
            conversation.settle(len(inputs) - kept, kept, mark)


def _draft(
    model, conversation, token, depth, mark, sampler, history, stop, drafter, governor, on_forward
) -> tuple[list[int], list[torch.Tensor]]:
    """At most `depth` proposals after `token`, and the distributions [1, V] that they were chosen from."""
    proposals: list[int] = []
    odds: list[torch.Tensor] = []
    if not depth:
        return proposals, odds
    ran, going = 0, True
    drafter.begin(governor.early)
    try:
        while going:
            if stop.is_set():
                raise Stopped
            on_forward(1, True)
            ran += 1
            logits = forward(model, conversation, [token])
            drafter.drafted(depth - ran)
            token, q = sampler.propose(logits, [*history, *proposals])
            proposals.append(token)
            odds.append(q)
            going = ran < depth and governor.go_on(ran, float(q[0, token]))
    finally:
        drafter.end()
        conversation.take_back(ran, mark)
    return proposals, odds


@torch.inference_mode()
def _verify(
    sampler: Sampler, rows: torch.Tensor, proposals: list[int], odds: list[torch.Tensor], history: list[int]
) -> tuple[int, int]:
    """(proposals accepted, the target's own token after them), from its logits `rows` [1 + proposals, V]."""
    for i, (proposal, q) in enumerate(zip(proposals, odds, strict=True)):
        row, before = rows[i : i + 1], [*history, *proposals[:i]]
        if sampler.greedy:
            best = sampler.choose(row, before)
            if best != proposal:
                return i, best
        else:
            p = sampler.probabilities(row, before)
            if not sampler.accept(p, q, proposal):
                return i, sampler.instead(p, q)
    return len(proposals), sampler.choose(rows[-1:], [*history, *proposals])


def _keep(model, conversation, inputs: list[int], refused: int, mark, on_forward) -> None:
    """Make the cache, which holds `inputs` and the `refused` proposals after them, hold `inputs` only."""
    if refused and mark:  # states that cannot be cropped: back to the window's beginning, and through what was accepted
        conversation.take_back(len(inputs) + refused, mark)
        on_forward(len(inputs), True)
        forward(model, conversation, inputs)
    else:
        conversation.take_back(refused, {})
