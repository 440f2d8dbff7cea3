"""The loss is KL(teacher ‖ student) over the teacher's top tokens plus one bucket for all others, a lower
bound of the full KL that differs from it only by what happens inside the tail.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _TopKL(torch.autograd.Function):
    """Computes the gradient in the forward, chunk by chunk, so that no more than one chunk of logits ever
    exists."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, top_ids: Tensor, top_log_probs: Tensor, chunk: int) -> Tensor:
        total = hidden.new_zeros(())
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            ids, log_p = top_ids[rows], top_log_probs[rows]
            logits = hidden[rows] @ head.T
            log_normaliser = logits.logsumexp(-1, keepdim=True)
            log_q = logits.gather(1, ids) - log_normaliser
            p, q = log_p.exp(), log_q.exp()
            p_tail = (1 - p.sum(1, keepdim=True)).clamp_min(1e-6)
            q_tail = (1 - q.sum(1, keepdim=True)).clamp_min(1e-6)
            total += (p * (log_p - log_q)).sum() + (p_tail * (p_tail.log() - q_tail.log())).sum()
            # d/d logit: q − p for a kept token, q·(1 − p_tail/q_tail) for a token of the tail.
            slope = logits.sub_(log_normaliser).exp_().mul_(1 - p_tail / q_tail).scatter_(1, ids, q - p)
            torch.mm(slope, head, out=gradient[rows])
        ctx.save_for_backward(gradient)
        return total / len(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * (grad / len(gradient)), None, None, None, None


def top_kl(hidden: Tensor, head: Tensor, top_ids: Tensor, top_log_probs: Tensor, chunk: int = 512) -> Tensor:
    """Mean over positions, in nats. hidden [n, hidden], head [vocabulary, hidden], top_ids and top_log_probs
    [n, k]."""
    return _TopKL.apply(hidden, head, top_ids, top_log_probs, chunk)
