"""A split puts every neuron of a SwiGLU layer into exactly one place: the shared expert or one routed group.

From the teacher's activations on a sample of chats: the neurons that contribute most, on average, are shared;
the rest are grouped so that neurons which are active on the same tokens sit together; then a router is fitted to
the layer's output, and a low-rank repair of the down projection makes up for what the router leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from engine.train.chats import Chat
from engine.train.repair import repair_down
from engine.train.router import contribution_grams, fit_router, routing_weights


@dataclass(frozen=True)
class SplitShape:
    """`shared` always-on neurons plus `experts` groups of `size` neurons, of which `active` are routed to per
    token."""

    shared: int
    experts: int
    size: int
    active: int

    @property
    def neurons(self) -> int:
        return self.shared + self.experts * self.size

    @property
    def active_share(self) -> float:
        """Share of the neurons that a token passes through."""
        return (self.shared + self.active * self.size) / self.neurons


@dataclass
class LayerSplit:
    """`order` [neurons] lists the dense neurons, shared ones first, then group by group; `router` [experts, hidden];
    `down_a` [rank, neurons] and `down_b` [hidden, rank] repair the down projection."""

    order: Tensor
    router: Tensor
    down_a: Tensor
    down_b: Tensor


@torch.no_grad()
def mlp_inputs(teacher: LlamaForCausalLM, chats: list[Chat]) -> list[Tensor]:
    """The input of every MLP at every position of the chats: per layer [tokens, hidden] float32."""
    inputs: list[list[Tensor]] = [[] for _ in teacher.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0][0].clone()))
        for layer, kept in zip(teacher.model.layers, inputs)
    ]
    for chat in chats:
        teacher.model(input_ids=chat.ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept) for kept in inputs]


def group_neurons(activity: Tensor, experts: int, rounds: int = 12) -> Tensor:
    """Balanced k-means by cosine similarity: activity [n, tokens], n = experts · size. Returns [experts,
    size] indices.

    Each round hands out places in the order of how much a neuron prefers its best group over its second best.
    """
    n = len(activity)
    size = n // experts
    unit = F.normalize(activity - activity.mean(1, keepdim=True), dim=1)
    similarity = unit @ unit.T
    # Start from strips along the leading direction of co-activation, which is deterministic.
    leading = torch.linalg.eigh(similarity)[1][:, -1]
    groups = leading.argsort().view(experts, size)
    for _ in range(rounds):
        member = torch.zeros(n, experts)
        for g, indices in enumerate(groups):
            member[indices, g] = 1.0
        # Similarity to the other members of each group's centre.
        score = (similarity @ member - member) / (size - member)
        best, second = score.topk(min(2, experts)).values.unbind(1) if experts > 1 else (score[:, 0], score[:, 0])
        room = [size] * experts
        filled: list[list[int]] = [[] for _ in range(experts)]
        for neuron in (best - second).argsort(descending=True).tolist():
            for g in score[neuron].argsort(descending=True).tolist():
                if room[g]:
                    room[g] -= 1
                    filled[g].append(neuron)
                    break
        groups = torch.tensor(filled)
    return groups.sort(dim=1).values


def split_layer(mlp: nn.Module, x: Tensor, shape: SplitShape, rank: int, *, sample: int = 4096) -> LayerSplit:
    """Splits one LlamaMLP by its inputs x [tokens, hidden]; grouping looks at the first `sample` tokens."""
    hidden = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    down = mlp.down_proj.weight.detach()
    if shape.neurons != hidden.shape[1]:
        raise ValueError(f"{shape} covers {shape.neurons} neurons, the layer has {hidden.shape[1]}")
    # Every token counts alike: without this, the few whose activations are a thousand times larger decide everything.
    hidden = hidden / (hidden @ down.T).norm(dim=1, keepdim=True)
    size_of = hidden.abs() * down.norm(dim=0)
    ranking = size_of.square().mean(0).argsort(descending=True)
    shared, routed = ranking[: shape.shared].sort().values, ranking[shape.shared :]
    groups = group_neurons(size_of[:sample, routed].T.contiguous(), shape.experts)
    order = torch.cat([shared, routed[groups].flatten()])
    hidden, down = hidden[:, order], down[:, order]
    grams = contribution_grams(hidden[:, shape.shared :], down[:, shape.shared :], shape.experts)
    router = fit_router(x, grams, shape.active)
    weighted = hidden.clone()
    weighted[:, shape.shared :].unflatten(1, (shape.experts, -1)).mul_(
        routing_weights(x, router, shape.active)[..., None]
    )
    return LayerSplit(order, router, *repair_down(hidden, weighted, down, rank))


def split_model(teacher: LlamaForCausalLM, inputs: list[Tensor], shape: SplitShape, rank: int) -> list[LayerSplit]:
    return [split_layer(layer.mlp, x, shape, rank) for layer, x in zip(teacher.model.layers, inputs)]
