"""A score compares two causal language models token by token on the same chats, over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.train.chats import Chat


@dataclass(frozen=True)
class Score:
    """`kl` is the mean KL(teacher ‖ student) in nats, `top1` the share of positions with the same likeliest
    token, the perplexities are those of the chats' reply tokens, all over `tokens` reply positions of `chats`
    chats."""

    kl: float
    kl_median: float
    top1: float
    teacher_perplexity: float
    student_perplexity: float
    tokens: int
    chats: int


@torch.inference_mode()
def score(teacher: Callable[[Tensor], Tensor], student: Callable[[Tensor], Tensor], chats: list[Chat]) -> Score:
    """Both models map ids [1, tokens] to logits [1, tokens, vocabulary]; only reply positions count."""
    divergences, agreements, losses = [], [], [[], []]
    for chat in chats:
        log_p, log_q = (model(chat.ids[None])[0, chat.targets].float().log_softmax(-1) for model in (teacher, student))
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        agreements.append((log_p.argmax(-1) == log_q.argmax(-1)).float())
        said = chat.ids[chat.targets + 1, None]
        for kept, log_probs in zip(losses, (log_p, log_q)):
            kept.append(-log_probs.gather(1, said)[:, 0])
    divergence = torch.cat(divergences)
    teacher_loss, student_loss = (torch.cat(kept).mean() for kept in losses)
    return Score(
        kl=divergence.mean().item(),
        kl_median=divergence.median().item(),
        top1=torch.cat(agreements).mean().item(),
        teacher_perplexity=teacher_loss.exp().item(),
        student_perplexity=student_loss.exp().item(),
        tokens=len(divergence),
        chats=len(chats),
    )
