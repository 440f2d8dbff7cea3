"""The student computes exactly what the built MoE checkpoint computes, as a dense layer whose routed groups
are weighted.

All neurons are computed and the activations of a group are multiplied by its routing weight, zero when the
group is not selected: on batches this is faster than gathering experts, and gradients come out the same.
Linears carry a low-rank correction, W + B·A (LoRA, Hu et al. 2021), merged once per optimiser step instead of
being applied beside W.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from engine.train.router import routing_weights
from engine.train.split import LayerSplit, SplitShape

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class _MergedLinear(torch.autograd.Function):
    """y = x·Mᵀ with M = W + B·A already merged; the backward gives the gradients of A and B, and of x."""

    @staticmethod
    def forward(ctx, x: Tensor, a: Tensor, b: Tensor, merged: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b, merged)
        return F.linear(x, merged)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, a, b, merged = ctx.saved_tensors
        g, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = (g @ merged).view(*grad.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return grad_x, (g @ b).T @ x, g.T @ (x @ a.T), None


class HealedLinear(nn.Module):
    """A frozen linear W [out, in] with a trained correction B [out, rank] · A [rank, in], zero at the
    start."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        out_features, in_features = weight.shape
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("merged", weight.clone(), persistent=False)
        self.a = nn.Parameter(torch.randn(rank, in_features, generator=generator) / in_features**0.5)
        self.b = nn.Parameter(torch.zeros(out_features, rank))

    @torch.no_grad()
    def merge(self) -> None:
        torch.addmm(self.weight, self.b, self.a, out=self.merged)

    def forward(self, x: Tensor) -> Tensor:
        return _MergedLinear.apply(x, self.a, self.b, self.merged)


class _WeightedSwiGLU(torch.autograd.Function):
    """silu(gate)·up, the routed groups multiplied by their weights [tokens, experts]; written out to save
    memory passes."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weights: Tensor, shared: int) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.shared = shared
        hidden = F.silu(gate).mul_(up)
        hidden[:, shared:].unflatten(1, (weights.shape[1], -1)).mul_(weights[..., None])
        return hidden

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up, weights = ctx.saved_tensors
        experts = weights.shape[1]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        routed = slice(ctx.shared, None)
        grad_weights = (grad[:, routed] * silu[:, routed]).mul_(up[:, routed]).unflatten(1, (experts, -1)).sum(-1)
        grad = grad.clone()
        grad[:, routed].unflatten(1, (experts, -1)).mul_(weights[..., None])
        grad_up = grad * silu
        # d silu/d gate = sigmoid + silu·(1 − sigmoid)
        slope = silu.addcmul_(silu, sigmoid, value=-1).add_(sigmoid)
        return grad.mul_(up).mul_(slope), grad_up, grad_weights, None


class RoutedMLP(nn.Module):
    """A SwiGLU layer in split order with its router [experts, hidden]."""

    def __init__(self, mlp: nn.Module, split: LayerSplit, shape: SplitShape, rank: int, generator: torch.Generator):
        super().__init__()
        self.shape = shape
        self.register_buffer("order", split.order, persistent=False)
        self.router = nn.Parameter(split.router.clone())
        self.gate_proj = HealedLinear(mlp.gate_proj.weight[split.order].clone(), rank, generator)
        self.up_proj = HealedLinear(mlp.up_proj.weight[split.order].clone(), rank, generator)
        self.down_proj = HealedLinear(mlp.down_proj.weight[:, split.order].contiguous(), rank, generator)
        self.down_proj.a.data.copy_(split.down_a)
        self.down_proj.b.data.copy_(split.down_b)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        hidden = _WeightedSwiGLU.apply(
            self.gate_proj(flat),
            self.up_proj(flat),
            routing_weights(flat, self.router, self.shape.active),
            self.shape.shared,
        )
        return self.down_proj(hidden).view(x.shape)


class Student(nn.Module):
    """The teacher with every MLP split and every linear healed. Only routers and low-rank factors are
    trainable."""

    def __init__(self, teacher: LlamaForCausalLM, splits: list[LayerSplit], shape: SplitShape, rank: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.rank = shape, rank
        self.lm = copy.deepcopy(teacher).requires_grad_(False)
        for layer, split in zip(self.lm.model.layers, splits):
            layer.mlp = RoutedMLP(layer.mlp, split, shape, rank, generator)
            for name in ATTENTION:
                weight = getattr(layer.self_attn, name).weight.detach().clone()
                setattr(layer.self_attn, name, HealedLinear(weight, rank, generator))

    def merge(self) -> None:
        """Brings the merged weights up to date; call after every change of the trained tensors."""
        for module in self.modules():
            if isinstance(module, HealedLinear):
                module.merge()

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states [batch, tokens, hidden] of right-padded ids [batch, tokens]; causality hides the padding."""
        return self.lm.model(input_ids=ids, use_cache=False).last_hidden_state

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self.hidden(ids), self.lm.lm_head.weight)

    def trained(self) -> dict[str, Tensor]:
        """The tensors that training changes, by their names in the asset."""
        return {name.removeprefix("lm.model."): p for name, p in self.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_trained(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.trained().items():
            parameter.copy_(tensors[name])
        self.merge()
