"""The drop-in for transformers' experts modules: same call, but each expert is leased from a tier and computed as it
comes.

The outputs of a token's experts are kept apart until all are there and then added in routing order, so the result never
depends on what was cached or which read came first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from engine.kernels.expert import ExpertKernel
from engine.residency.misses import HostExperts
from engine.residency.tier import Tier

_FEW_TOKENS = 64  # up to which an expert has so few of them that the calls are the cost: a batch of experts shares them


def _without(keys: list[int], others: list[int]) -> list[int]:
    return [key for key in keys if key not in others] if others else keys


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
        self.host: HostExperts | None = None  # computes what is missing where it lies, where that may be
        self.draft: Callable[..., torch.Tensor] | None = None  # computes instead while the model drafts
        self.dropped = 0  # experts routed to and not computed; there is no way to drop one, and this proves it

    def functions(self) -> tuple[Callable, Callable | None]:
        """What the model does between an expert's projections, [n, 2I or I] -> [n, I], and after the second, or None."""
        inner = self.inner
        finish = inner.post_expert_norm if inner.has_post_expert_norm else None
        return inner._apply_gate if inner.has_gate else inner.act_fn, finish

    def attach(self, tier: Tier, kernel: ExpertKernel, host: HostExperts | None = None) -> None:
        """Compute from `tier` from now on, and by `host` what it chooses."""
        self.tier, self.kernel, self.host = tier, kernel, host

    def detach(self) -> None:
        """Hold no view of any slot any more."""
        self.tier = self.kernel = self.host = None

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
        here = self.host.choose(dict.fromkeys(keys, 1)) if self.host else []

        def meanwhile() -> None:
            arrived.extend(here)
            parts.append(self.host.compute(here, x.expand(len(here), -1), [1] * len(here)))

        for batch in self.tier.lease(_without(keys, here), meanwhile if here else None):
            arrived += [key for key, _ in batch]
            parts.append(self.kernel.for_one_token([slot for _, slot in batch], x))
        self.dropped += len(keys) - len(arrived)
        if len(keys) < len(ids):
            parts.append(torch.zeros_like(x))  # the last row stands for "no expert"
        row = {key: i for i, key in enumerate(arrived)}
        outputs = torch.cat(parts) if len(parts) > 1 else parts[0]
        rows = torch.tensor([row.get(base + i, len(arrived)) for i in ids], device=x.device)
        return outputs.index_select(0, rows).unsqueeze(0)

    def _many_tokens(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x [n, H], index [n, k] -> [n, k, H]; every needed expert is visited once, in one call for all its tokens."""
        n, k = index.shape
        flat = index.reshape(-1)
        base = self.layer * self.experts
        counts = torch.bincount(flat, minlength=self.experts)[: self.experts].tolist()
        keys = [base + expert for expert, count in enumerate(counts) if count]
        here = self.host.choose({key: counts[key - base] for key in keys}) if self.host and n <= _FEW_TOKENS else []
        if not here and self.kernel.computes_together(len(keys), n):
            return self._together(x, index.tolist(), keys)
        order = torch.argsort(flat, stable=True)  # (token, choice) pairs grouped by expert
        order = order[: sum(counts)]  # without those of no expert
        spans = dict(zip(keys, order.split([counts[key - base] for key in keys]), strict=True)) if keys else {}
        outputs, computed = x.new_zeros(n * k, x.shape[1]), 0

        def compute(group: list[int], by: Callable[..., torch.Tensor], names: list[int]) -> None:
            """The experts `group`, which `by` knows as `names`, for all their tokens."""
            nonlocal computed
            computed += len(group)
            pairs = torch.cat([spans[key] for key in group])
            rows = x.index_select(0, pairs // k)
            outputs.index_copy_(0, pairs, by(names, rows, [counts[key - base] for key in group]))

        meanwhile = partial(compute, here, self.host.compute, here) if here else None
        for batch in self.tier.lease(_without(keys, here), meanwhile):
            for group in [batch] if n <= _FEW_TOKENS else [[pair] for pair in batch]:
                compute([key for key, _ in group], self.kernel, [slot for _, slot in group])
        self.dropped += len(keys) - computed
        return outputs.view(n, k, -1)

    def _together(self, x: torch.Tensor, ids: list[list[int]], keys: list[int]) -> torch.Tensor:
        """x [n, H], k ids a token -> [n, k, H]: copies of all of `keys`, in that order, computed once all are there."""
        copies: list[list[torch.Tensor]] = []
        arrived: list[int] = []
        for batch in self.tier.lease(keys):
            arrived += [key for key, _ in batch]
            copies.append(self.kernel.copy([slot for _, slot in batch]))
        self.dropped += len(keys) - len(arrived)
        if arrived == keys and len(copies) == 1:
            tensors = copies[0]
        else:
            place = {key: i for i, key in enumerate(arrived)}
            order = torch.tensor([place[key] for key in keys], device=x.device)
            tensors = [torch.cat(parts).index_select(0, order) for parts in zip(*copies, strict=True)]
        outputs = self.kernel.together(tensors, x).flatten(0, 1)
        n, none = x.shape[0], outputs.shape[0]
        first = {key - self.layer * self.experts: i * n for i, key in enumerate(keys)}  # row of an expert's first token
        rows = [first[i] + token if i < self.experts else none for token, chosen in enumerate(ids) for i in chosen]
        if none in rows:
            outputs = torch.cat((outputs, torch.zeros_like(x[:1])))
        return outputs.index_select(0, torch.tensor(rows, device=x.device)).view(n, -1, x.shape[1])
