"""A router's weights are `active` · softmax over the selected logits: they sum to `active`, so one each is the neutral
point at which the selected groups contribute exactly what they did in the dense layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def routing_weights(x: Tensor, router: Tensor, active: int) -> Tensor:
    """x [tokens, hidden] and router [experts, hidden] give weights [tokens, experts], zero where not selected."""
    logits, selected = F.linear(x, router).topk(active)
    weights = logits.softmax(-1) * active
    return torch.zeros(len(x), len(router), dtype=x.dtype).scatter(1, selected, weights)


def routed_error(grams: Tensor, weights: Tensor) -> Tensor:
    """Mean squared error of the layer's output when group g counts weights[:, g] times instead of once.

    grams [tokens, experts, experts] holds the inner products of the groups' contributions.
    """
    missing = weights - 1
    return torch.einsum("te,tef,tf->t", missing, grams, missing).mean()


def contribution_grams(hidden: Tensor, down: Tensor, experts: int) -> Tensor:
    """Inner products [tokens, experts, experts] of what the groups add to the layer's output, from the routed activations
    hidden [tokens, routed] and their down projection [hidden, routed]."""
    per_expert = zip(hidden.chunk(experts, 1), down.chunk(experts, 1))
    added = torch.stack([h @ d.T for h, d in per_expert], 1)
    return added @ added.mT


def ridge_router(x: Tensor, grams: Tensor, *, ridge: float = 1e-2, sharpness: float = 0.3) -> Tensor:
    """Ridge regression of the size of each group's contribution on x, without intercept because a router has none.
    The logits get the standard deviation `sharpness`, so that the weights start near one each."""
    size = grams.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    normal = x.T @ x
    normal.diagonal().add_(ridge * normal.diagonal().mean())
    weight = torch.linalg.solve(normal, x.T @ size).T
    logits = x @ weight.T
    return weight * (sharpness / (logits - logits.mean(1, keepdim=True)).std())


def fit_router(
    x: Tensor,
    grams: Tensor,
    active: int,
    *,
    steps: int = 150,
    batch: int = 2048,
    lr: float = 2e-3,
    seed: int = 0,
) -> Tensor:
    """Starts from the ridge router and descends the layer's own output error. Returns [experts, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    scale = x.square().mean().sqrt()
    router = (ridge_router(x, grams) * scale).requires_grad_()
    x, grams = x / scale, grams / grams.diagonal(dim1=1, dim2=2).mean()
    optimiser = torch.optim.Adam([router], lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * (1 - step / steps)
        rows = torch.randint(len(x), (min(batch, len(x)),), generator=generator)
        (gradient,) = torch.autograd.grad(routed_error(grams[rows], routing_weights(x[rows], router, active)), router)
        router.grad = gradient
        optimiser.step()
    return (router.detach() / scale).contiguous()
