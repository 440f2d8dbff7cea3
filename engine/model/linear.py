"""On a processor without bf16 arithmetic, a resident bf16 linear is computed in the way that suits its number of rows.

torch emulates such a product. It is faster with a vector than with a matrix of one row, and slower than converting the weights
to fp32 once there are many rows. All ways add up in fp32 and round once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from engine.kernels.formats import VECTOR_WEIGHTS
from engine.model.resident import is_router
from engine.model.skeleton import parent_of

_LEAST = 2**17  # weights below this are not worth it
_FP32_ROWS = 64  # measured at 576 x 576 to 2048 x 2048: even at 32 rows, 2 to 3 times as fast at 128
_BLOCK = 2**22  # most weights that are in fp32 at a time


class EmulatedLinear(nn.Linear):
    """Stands for `module` and shares its parameters. x [..., K] bf16 -> [..., N] bf16."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module.in_features, module.out_features, module.bias is not None, device="meta")
        self.weight, self.bias = module.weight, module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 1 and self.weight.numel() >= VECTOR_WEIGHTS:
            vector = rows[0]
            out = torch.mv(self.weight, vector) if self.bias is None else torch.addmv(self.bias, self.weight, vector)
        elif rows.shape[0] >= _FP32_ROWS:
            out = self._in_fp32(rows)
        else:
            return super().forward(x)
        return out.view(*x.shape[:-1], self.out_features)

    def _in_fp32(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        weights = self.weight.split(max(1, _BLOCK // self.in_features))
        biases = [None] * len(weights) if self.bias is None else self.bias.float().split([len(w) for w in weights])
        parts = [linear(wide, w.float(), b).to(rows.dtype) for w, b in zip(weights, biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def emulate_linears(model: nn.Module) -> None:
    """Put an `EmulatedLinear` in the place of every plain bf16 linear that is large enough and no router."""
    plain = [path for path, module in model.named_modules() if type(module) is nn.Linear and not is_router(path)
             and module.weight.dtype == torch.bfloat16 and module.weight.numel() >= _LEAST]  # fmt: skip
    for path in plain:
        parent, name = parent_of(model, path)
        setattr(parent, name, EmulatedLinear(model.get_submodule(path)))
