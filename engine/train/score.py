"""A score compares two causal language models token by token on the same chats, over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.train.chats import Chat


@dataclass(frozen=True)
class Comparison:
    """One chat. divergence, agree, teacher_loss, student_loss: [n], for each of its n reply positions; see `Score`."""

    divergence: Tensor
    agree: Tensor
    teacher_loss: Tensor
    student_loss: Tensor


@dataclass(frozen=True)
class Score:
    """`kl` is the mean KL(teacher ‖ student) in nats, `top1` the share of positions with the same likeliest
    token, the perplexities are those of the chats' reply tokens, all over `tokens` reply positions of `chats`
    chats. `kl_error` is the standard error of `kl` as chats differ, with tokens within a chat taken as dependent."""

    kl: float
    kl_error: float
    kl_median: float
    top1: float
    teacher_perplexity: float
    student_perplexity: float
    tokens: int
    chats: int

    @staticmethod
    def of(compared: list[Comparison]) -> Score:
        divergence, agree, teacher_loss, student_loss = (
            torch.cat([getattr(one, name) for one in compared])
            for name in ("divergence", "agree", "teacher_loss", "student_loss")
        )
        kl = divergence.mean().item()
        return Score(
            kl=kl,
            # of a ratio of sums over chats: Cochran, Sampling Techniques, section 6.4
            kl_error=math.sqrt(sum((one.divergence - kl).sum().item() ** 2 for one in compared)) / len(divergence),
            kl_median=divergence.median().item(),
            top1=agree.mean().item(),
            teacher_perplexity=teacher_loss.mean().exp().item(),
            student_perplexity=student_loss.mean().exp().item(),
            tokens=len(divergence),
            chats=len(compared),
        )


Model = Callable[[Tensor], Tensor]  # ids [1, tokens] -> logits [1, tokens, vocabulary]


@torch.inference_mode()
def compare(teacher: Model, student: Model, chats: list[Chat]) -> list[Comparison]:
    """Both models at the reply positions of every chat."""
    return [_compare(teacher, student, chat) for chat in chats]


def _compare(teacher: Model, student: Model, chat: Chat) -> Comparison:
    log_p, log_q = (model(chat.ids[None])[0, chat.targets].float().log_softmax(-1) for model in (teacher, student))
    said = chat.ids[chat.targets + 1, None]
    teacher_loss, student_loss = (-log_probs.gather(1, said)[:, 0] for log_probs in (log_p, log_q))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    return Comparison(divergence, (log_p.argmax(-1) == log_q.argmax(-1)).float(), teacher_loss, student_loss)
