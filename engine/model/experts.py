"""The drop-in for transformers' experts modules: same call, but each expert is leased from a tier and computed as it
comes.

The outputs of a token's experts are kept apart until all are there and then added in routing order, so the result never
depends on what was cached or which read came first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.kernels.expert import ExpertKernel
from engine.residency.tier import Tier


class StreamedExperts(nn.Module):
    """Experts `layer * experts ... (layer + 1) * experts - 1` of the tier, in place of one experts module.

    inner: the original module without its weights. It stays for what transformers defines on it: the gate between the
    projections, the activation, a norm after each expert.
    """

    def __init__(self, inner: nn.Module, layer: int, experts: int) -> None:
        super().__init__()
        self.inner, self.layer, self.experts = inner, layer, experts
        self.tier: Tier | None = None
        self.kernel: ExpertKernel | None = None
        self.draft: Callable[..., torch.Tensor] | None = None  # computes instead while the model drafts
        self.dropped = 0  # experts routed to and not computed; there is no way to drop one, and this proves it

    def functions(self) -> tuple[Callable, Callable | None]:
        """What the model does between an expert's projections, [n, 2I or I] -> [n, I], and after the second, or None."""
        inner = self.inner
        finish = inner.post_expert_norm if inner.has_post_expert_norm else None
        return inner._apply_gate if inner.has_gate else inner.act_fn, finish

    def attach(self, tier: Tier, kernel: ExpertKernel) -> None:
        """Compute from `tier` from now on."""
        self.tier, self.kernel = tier, kernel

    def detach(self) -> None:
        """Hold no view of any slot any more."""
        self.tier = self.kernel = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [n, H], top_k_index [n, k] int, top_k_weights [n, k] -> [n, H] in hidden_states.dtype.

        An index of `experts` or more means no expert (transformers' sentinel); it contributes nothing.
        """
        if self.draft is not None:
            return self.draft(hidden_states, top_k_index, top_k_weights)
        if hidden_states.shape[0] == 1:
            outputs = self._one_token(hidden_states, top_k_index[0].tolist())
        else:
            outputs = self._many_tokens(hidden_states, top_k_index)
        return (outputs * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    def _one_token(self, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """x [1, H], k ids -> [1, k, H]."""
        base = self.layer * self.experts
        keys = list(dict.fromkeys(base + i for i in ids if i < self.experts))
        arrived: list[int] = []
        parts: list[torch.Tensor] = []
        for batch in self.tier.lease(keys):
            arrived += [key for key, _ in batch]
            parts.append(self.kernel.for_one_token([slot for _, slot in batch], x))
        self.dropped += len(keys) - len(arrived)
        if len(keys) < len(ids):
            parts.append(torch.zeros_like(x))  # the last row stands for "no expert"
        row = {key: i for i, key in enumerate(arrived)}
        outputs = torch.cat(parts) if len(parts) > 1 else parts[0]
        order = [row.get(base + i, -1) for i in ids]
        return outputs[order].unsqueeze(0)

    def _many_tokens(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x [n, H], index [n, k] -> [n, k, H]; every needed expert is visited once, in one call for all its tokens."""
        n, k = index.shape
        flat = index.reshape(-1)
        order = torch.argsort(flat, stable=True)  # (token, choice) pairs grouped by expert
        counts = torch.bincount(flat, minlength=self.experts)[: self.experts].tolist()
        base, spans, start = self.layer * self.experts, {}, 0
        for expert, count in enumerate(counts):
            if count:
                spans[base + expert] = order[start : start + count]
                start += count
        outputs, computed = x.new_zeros(n * k, x.shape[1]), 0
        for batch in self.tier.lease(list(spans)):
            for key, slot in batch:
                pairs = spans[key]
                outputs[pairs] = self.kernel(slot, x[pairs // k])
            computed += len(batch)
        self.dropped += len(spans) - computed
        return outputs.view(n, k, -1)
