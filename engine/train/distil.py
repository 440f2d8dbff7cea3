"""Distillation is one pass over the chats in an order fixed by the seed, so a resumed run continues as if
never stopped.

Routers and low-rank factors are trained together on KL(teacher ‖ student) at the reply positions.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.train.chats import Chat
from engine.train.loss import top_kl
from engine.train.student import Student


@dataclass(frozen=True)
class DistilSettings:
    """`batch_tokens` bounds a step's padded tokens; learning rates warm up linearly over the share `warm_up`
    of the steps and fall by a cosine to `final` times their peak. A step's chats are shared out among
    `workers` threads, each of which should compute with one core (`torch.set_num_threads(1)`): large matrices
    then need no barriers."""

    batch_tokens: int = 1024
    router_lr: float = 2e-3
    healing_lr: float = 1e-3
    warm_up: float = 0.04
    final: float = 0.02
    clip: float = 1.0
    save_every: int = 20
    workers: int = 2
    seed: int = 0


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


def batch_loss(student: Student, chats: list[Chat]) -> Tensor:
    """KL(teacher ‖ student) at the reply positions of one right-padded batch of chats."""
    ids = pad_sequence([chat.ids for chat in chats], batch_first=True)
    positions = torch.cat([chat.targets + row * ids.shape[1] for row, chat in enumerate(chats)])
    hidden = student.hidden(ids).flatten(0, 1)[positions]
    top_ids = torch.cat([chat.top_ids for chat in chats])
    top_log_probs = torch.cat([chat.top_log_probs for chat in chats])
    return top_kl(hidden, student.lm.lm_head.weight, top_ids, top_log_probs)


def _gradients(
    student: Student, parameters: list[Tensor], total: int, chats: list[Chat]
) -> tuple[float, tuple[Tensor, ...]]:
    """Loss and gradients of a part of a step that has `total` reply positions in all."""
    loss = batch_loss(student, chats) * (sum(len(chat.targets) for chat in chats) / total)
    return loss.item(), torch.autograd.grad(loss, parameters)


def _schedule(step: int, steps: int, settings: DistilSettings) -> float:
    warm_up = max(1, round(settings.warm_up * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * progress))


def distil(
    student: Student,
    chats: list[Chat],
    settings: DistilSettings,
    checkpoint: Path,
    report: Callable[[dict], None] = lambda _: None,
    stop_after: int | None = None,
) -> None:
    """Trains `student` in place. `checkpoint` is written every `save_every` steps and continued from if it
    exists; it must come from the same chats and settings. `stop_after` ends the run early at that step."""
    batches = make_batches([len(chat.ids) for chat in chats], settings.batch_tokens, settings.seed)
    steps = len(batches)
    trained = student.trained()
    peaks = [settings.router_lr, settings.healing_lr]
    groups = [[p for n, p in trained.items() if n.endswith(".router") == routers] for routers in (True, False)]
    parameters = [p for group in groups for p in group]
    optimiser = torch.optim.Adam([{"params": g, "lr": lr} for g, lr in zip(groups, peaks)], betas=(0.9, 0.98))
    identity = {**asdict(settings), "steps": steps, "tokens": sum(len(chat.ids) for chat in chats)}
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["identity"] != identity:
            raise ValueError(f"{checkpoint} belongs to another run ({state['identity']}); remove it to start again")
        student.load_trained(state["trained"])
        first = state["step"]
        if first < steps:
            optimiser.load_state_dict(state["optimiser"])
    student.merge()
    with ThreadPoolExecutor(settings.workers) as pool:
        for step in range(first, steps if stop_after is None else min(stop_after, steps)):
            started = time.monotonic()
            batch = [chats[i] for i in batches[step]]
            for group, peak in zip(optimiser.param_groups, peaks):
                group["lr"] = peak * _schedule(step, steps, settings)
            parts = [batch[i :: settings.workers] for i in range(min(settings.workers, len(batch)))]
            total = sum(len(chat.targets) for chat in batch)
            losses, parts_gradients = zip(*pool.map(partial(_gradients, student, parameters, total), parts))
            for parameter, *summands in zip(parameters, *parts_gradients):
                parameter.grad = sum(summands[1:], start=summands[0])
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimiser.step()
            optimiser.zero_grad()
            student.merge()
            tokens = sum(len(chat.ids) for chat in batch)
            report({"step": step + 1, "steps": steps, "kl": sum(losses), "norm": norm.item(), "tokens": tokens,
                    "seconds": time.monotonic() - started})  # fmt: skip
            if (step + 1) % settings.save_every == 0 or step + 1 == steps:
                state = {
                    "identity": identity,
                    "step": step + 1,
                    "trained": trained,
                    "optimiser": optimiser.state_dict(),
                }
                temporary = checkpoint.with_suffix(".partial")
                torch.save(state, temporary)
                temporary.replace(checkpoint)
