"""Resident linears can be held in int4: a module that stands where a Linear stood and computes with the packed
kernel."""

from __future__ import annotations

import torch
from torch import nn

from engine.kernels.formats import MatrixFormat
from engine.kernels.int4 import native_packing
from engine.model.skeleton import parent_of

_LEAST = 2**16  # weights below this are not worth it: routers, gates, low-rank pieces


class Int4Linear(nn.Module):
    """x [..., K] -> [..., N] in x.dtype with W [N, K] held as int4, group 64, quantised by hqq."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        form = MatrixFormat.choose("int4", (self.out_features, self.in_features), native_packing())
        encoded = form.encode(linear.weight.data)
        self.register_buffer("q", encoded[".q"])
        self.register_buffer("sz", encoded[".sz"])
        self.bias = linear.bias
        self._matmul = form.matmul(linear.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._matmul(x.reshape(-1, self.in_features), self.q, self.sz).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def quantise_linears(model: nn.Module) -> None:
    """Replace the large linears of `model`, one at a time. Embeddings, and output heads tied to them, stay as they
    are."""
    tied = {p.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.numel() < _LEAST or module.weight.data_ptr() in tied:
            continue
        if module.in_features % 32 or module.out_features % 16:
            continue
        parent, name = parent_of(model, path)
        setattr(parent, name, Int4Linear(module))
