"""Heads are fitted layer by layer to the routing that the next layer chose at the next token, without the model.

The loss is the soft cross-entropy to that layer's own mixing weights; the linear term starts from that layer's router, the rest
at zero. What is reported comes from chats that were not fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.forecast.law import RoutingLaw
from engine.train.edge0.capture import Captured
from engine.train.edge0.path import TrainedHead, Turns, features

HOLD_OUT = 15  # every so many-th chat is not trained on; odd, since greedy and sampled chats take turns


@dataclass(frozen=True)
class FitSettings:
    """inner: P, the width between W_1 and W_2."""

    inner: int = 128
    epochs: int = 4
    batch: int = 512
    lr: float = 1e-3
    weight_decay: float = 1e-4
    seed: int = 0


def log_scores(logits: Tensor, law: RoutingLaw) -> Tensor:
    """Log of the scores a law selects by, as a distribution over the experts: [..., E]."""
    return logits.log_softmax(-1) if law.scoring == "softmax" else nn.functional.logsigmoid(logits).log_softmax(-1)


def soft_target(logits: Tensor, ids: Tensor, law: RoutingLaw) -> Tensor:
    """What a head is to say where the layer's own router says `logits` [n, E] and chose `ids` [n, k]: the mixing weights,
    or, where a law uses the scores as they are, all scores. Rows sum to one."""
    scores = log_scores(logits, law).exp()
    if not law.normalise and law.scoring == "softmax":
        return scores
    chosen = scores.gather(-1, ids)
    return torch.zeros_like(scores).scatter_(-1, ids, chosen / chosen.sum(-1, keepdim=True))


def head_loss(said: Tensor, target: Tensor, law: RoutingLaw) -> Tensor:
    """Soft cross-entropy of what heads said [n, E] to targets [n, E]."""
    return -(target * log_scores(said, law)).sum(-1).mean()


def agreement(said: Tensor, target: Tensor, ids: Tensor, law: RoutingLaw) -> dict[str, float]:
    """How well heads' logits [n, E] foresee routers that chose `ids` [n, k], with targets [n, E]: overlap, the share of
    the chosen experts that the router chose too; mass, the share of the target on them, relative to the router's own; top1,
    how often the router's first choice is among them."""
    chosen = torch.zeros_like(target).scatter_(-1, law.select(said)[0], 1.0)
    own = target.gather(-1, ids)
    first = ids.gather(-1, own.argmax(-1, keepdim=True))
    return {
        "overlap": chosen.gather(-1, ids).mean().item(),
        "mass": ((target * chosen).sum(-1) / own.sum(-1)).mean().item(),
        "top1": chosen.gather(-1, first).mean().item(),
    }


def fit_head(
    captured: Captured, owner: int, gate: Tensor, law: RoutingLaw, experts: int, settings: FitSettings
) -> tuple[TrainedHead, dict[str, float]]:
    """The head of MoE layer `owner` for the layer after it, whose router's weight is `gate` [E, H]; and its agreement."""
    m, _, ids = captured.layer(owner)
    _, own, own_ids = captured.layer(owner + 1)
    own, own_ids = own.float(), own_ids.long()
    generator = torch.Generator().manual_seed(settings.seed + owner)
    head = TrainedHead.start(gate, settings.inner, generator)
    turns = Turns(captured.decoded[None])
    # Chats follow one another without a gap, but their first tokens are never decoded ones.
    rows = torch.nonzero(turns.followed[0])[:, 0]  # positions that are forecast, from the one before
    seen = features(m[None].float(), ids[None].long(), turns, experts)[0]
    held = captured.chat[rows] % HOLD_OUT == 0
    training, scored = rows[~held], rows[held]
    optimiser = torch.optim.AdamW(head.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    steps = settings.epochs * max(1, -(-len(training) // settings.batch))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(settings.epochs):
        for batch in training[torch.randperm(len(training), generator=generator)].split(settings.batch):
            loss = head_loss(head(seen[batch - 1]), soft_target(own[batch], own_ids[batch], law), law)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    if not len(scored):
        return head, {}
    target = soft_target(own[scored], own_ids[scored], law)
    with torch.no_grad():
        return head, agreement(head(seen[scored - 1]), target, own_ids[scored], law)
