"""One pass of Adam over chats, in an order fixed by the seed, so that an interrupted run continues as if it had never stopped.

A step's chats are shared out among threads that each compute with one core: between them there are no barriers, and the
matrices here are too small to share one well.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.train.chats import Chat


@dataclass(frozen=True)
class DescentSettings:
    """`batch_tokens` bounds a step's padded tokens; learning rates warm up linearly over the share `warm_up` of the steps
    and fall by a cosine to `final` times their peak. `workers`: threads."""

    batch_tokens: int = 1024
    warm_up: float = 0.04
    final: float = 0.02
    clip: float = 1.0
    save_every: int = 20
    workers: int = 2
    seed: int = 0


class Trainee(Protocol):
    """What is trained."""

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters and their peak learning rate."""

    def loss(self, chats: list[Chat]) -> tuple[Tensor, float]:
        """(mean loss over the reply positions of a batch, its KL alone). Called from several threads at once."""

    def trained(self) -> dict[str, Tensor]:
        """All that training changes, by name."""

    def load_trained(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `trained` returned once."""

    def changed(self) -> None:
        """The parameters have been changed."""


def make_batches(lengths: list[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Index batches covering every chat once, of similar lengths within a batch, in shuffled order."""
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), 128):
        batch: list[int] = []
        for i in sorted(order[start : start + 128], key=lambda i: -lengths[i]):
            if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


def schedule(step: int, steps: int, settings: DescentSettings) -> float:
    """Share of the peak learning rate at `step` of `steps`."""
    warm_up = max(1, round(settings.warm_up * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * progress))


def descend(
    trainee: Trainee,
    chats: list[Chat],
    settings: DescentSettings,
    checkpoint: Path,
    report: Callable[[dict], None] = lambda _: None,
    stop_after: int | None = None,
) -> None:
    """Trains in place. `checkpoint` is written every `save_every` steps and continued from if it exists; it must come from
    the same chats and settings. `stop_after` ends the run early at that step."""
    batches = make_batches([len(chat.ids) for chat in chats], settings.batch_tokens, settings.seed)
    steps = len(batches)
    groups = trainee.groups()
    parameters = [p for group, _ in groups for p in group]
    optimiser = torch.optim.Adam([{"params": group, "lr": lr} for group, lr in groups], betas=(0.9, 0.98))
    rates = [lr for _, lr in groups]
    identity = {**asdict(settings), "rates": rates, "steps": steps, "tokens": sum(len(chat.ids) for chat in chats)}
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["identity"] != identity:
            raise ValueError(f"{checkpoint} belongs to another run ({state['identity']}); remove it to start again")
        trainee.load_trained(state["trained"])
        first = state["step"]
        if first < steps:
            optimiser.load_state_dict(state["optimiser"])
    trainee.changed()

    def gradients(part: list[Chat], total: int) -> tuple[float, tuple[Tensor | None, ...]]:
        """KL and gradients of a part of a step that has `total` reply positions in all."""
        share = sum(len(chat.targets) for chat in part) / total
        loss, kl = trainee.loss(part)
        return kl * share, torch.autograd.grad(loss * share, parameters, allow_unused=True)

    with ThreadPoolExecutor(settings.workers) as pool:
        for step in range(first, steps if stop_after is None else min(stop_after, steps)):
            began = time.monotonic()
            batch = [chats[i] for i in batches[step]]
            for group, peak in zip(optimiser.param_groups, rates):
                group["lr"] = peak * schedule(step, steps, settings)
            parts = [batch[i :: settings.workers] for i in range(min(settings.workers, len(batch)))]
            total = sum(len(chat.targets) for chat in batch)
            kls, found = zip(*pool.map(gradients, parts, [total] * len(parts)))
            for parameter, *summands in zip(parameters, *found):
                there = [gradient for gradient in summands if gradient is not None]
                parameter.grad = sum(there[1:], start=there[0]) if there else None
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimiser.step()
            optimiser.zero_grad()
            trainee.changed()
            tokens = sum(len(chat.ids) for chat in batch)
            report({"step": step + 1, "steps": steps, "kl": sum(kls), "norm": norm.item(), "tokens": tokens,
                    "seconds": time.monotonic() - began})  # fmt: skip
            if (step + 1) % settings.save_every == 0 or step + 1 == steps:
                state = {"identity": identity, "step": step + 1, "trained": trainee.trained(),
                         "optimiser": optimiser.state_dict()}  # fmt: skip
                temporary = checkpoint.with_suffix(".partial")
                torch.save(state, temporary)
                temporary.replace(checkpoint)
