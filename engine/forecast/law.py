"""A routing law turns logits into experts and their weights exactly as a model's own router does, whoever made the logits.

Two laws cover most architectures: softmax with top-k (Mixtral, Qwen, OLMoE, gpt-oss, Granite, the shallow DeepSeek V2), and
sigmoid with the best groups first (DeepSeek V3, GLM, Bailing). Which one a router follows is found by asking it: a law is
taken only when it gives the router's own choice and weights on random inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn

from engine.errors import ConfigError
from engine.model.router import as_routing

_PROBES = 32
_TOLERANCE = 1e-2  # weights may be rounded to bfloat16 by the router


@dataclass(frozen=True)
class RoutingLaw:
    """scoring: `softmax` or `sigmoid` of the logits. normalise: the selected scores are divided by their sum; `scale`
    then multiplies them. Of `groups` equal groups only the `kept_groups` best may be chosen from; a group's worth is the
    sum of its two best scores.
    """

    scoring: str
    top_k: int
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1

    def select(self, logits: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [n, E] -> (ids [n, k] int64, weights [n, k] float32). `correction` [E] moves the choice only."""
        if self.scoring == "softmax" and self.normalise and correction is None and self.kept_groups == self.groups:
            top, ids = logits.topk(self.top_k, dim=-1)
            weights = top.softmax(-1, dtype=torch.float32)  # of the chosen: that of all, divided by their sum
            return ids, weights if self.scale == 1 else weights * self.scale
        logits = logits.float()
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        choice = scores if correction is None else scores + correction.float()
        if self.kept_groups < self.groups:
            grouped = choice.unflatten(-1, (self.groups, -1))
            worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(worth).scatter_(-1, worth.topk(self.kept_groups, dim=-1).indices, 1.0)
            choice = grouped.masked_fill(kept.unsqueeze(-1) == 0, -torch.inf).flatten(-2)
        ids = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.scale


def find_law(router: nn.Module, hidden: int, top_k: int, name: str) -> RoutingLaw:
    """The law that `router`, whose inputs are `hidden` wide, follows. name: what to call the architecture in an error.

    Raises ConfigError when neither law is the router's.
    """
    weight = next(router.parameters())
    # Large inputs set the scores well apart, so that rounding cannot swap two of them.
    x = torch.randn(_PROBES, hidden, generator=torch.Generator().manual_seed(0)) * 4
    try:
        with torch.inference_mode():
            own = as_routing(router(x.to(weight.device, weight.dtype)))
    except (TypeError, StopIteration):  # it needs more than its input, or returns something else than a routing
        own = None
    if own is not None:
        told = torch.zeros_like(own.logits, dtype=torch.float32).scatter_(-1, own.ids, own.weights.float())
        for law in _candidates(router, top_k):
            made = torch.zeros_like(told)
            made.scatter_(-1, *law.select(own.logits, getattr(router, "e_score_correction_bias", None)))
            if torch.allclose(told, made, rtol=_TOLERANCE, atol=_TOLERANCE * law.scale / top_k):
                return law
    raise ConfigError(f"{name} routes neither by softmax and top-k nor by sigmoid and groups: Edge0 mode cannot forecast its "
                      "routing; use on-demand mode")  # fmt: skip


def _candidates(router: nn.Module, top_k: int):
    """Laws to try, those without a scale and groups first."""
    scale = float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)
    groups = int(getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1)
    kept = int(getattr(router, "topk_group", None) or groups)
    for scoring, normalise, factor in product(("softmax", "sigmoid"), (True, False), dict.fromkeys((1.0, scale))):
        law = RoutingLaw(scoring, top_k, normalise, factor)
        yield law
        if groups > 1:
            yield replace(law, groups=groups, kept_groups=kept)
