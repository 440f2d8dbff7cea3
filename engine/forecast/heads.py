"""A prerouter head forecasts the routing of the next layer at the next token from what its own layer sees at this one.

The maths is Edge0's (Edge0-AI, arXiv 2609.18063): with m [H] the MoE input of the owner layer, and cur and prev [E] the sums of
the one-hots of the experts that it ran at this and at the previous token,

    f = concat(m, cur, prev)        logits = W_lin f + W_2 gelu(W_1 f)

without biases, with the exact GELU. Files hold `layers.N.{fc1,fc2,linear_init}.weight` in float16, N the owner's number among
the decoder's layers, and say in their metadata which model they belong to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import gelu

from engine.errors import StoreError
from engine.memory.block import empty_together
from engine.store.adapter import read_adapter, write_adapter

FILE = "prerouter_edge0.safetensors"  # what training writes
_KEY = re.compile(r"layers\.(\d+)\.(?:mlp\.prerouter\.)?(fc1|fc2|linear_init)\.weight")


@dataclass(frozen=True)
class Head:
    """One owner layer's head, in the dtype it computes in.

    dense [H, P + E] is W_1 beside W_lin, of the columns for m, transposed. sparse [2E, P + E] holds the columns for cur, then
    for prev, as rows: multiplying by sums of one-hots is adding those rows up. out [P, E] is W_2, transposed.
    """

    dense: torch.Tensor
    sparse: torch.Tensor
    out: torch.Tensor

    def logits(self, m: torch.Tensor, current: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """m [1, H], ids of the experts that ran [k] at this token and [k] at the previous one, if any -> [1, E]."""
        inner, experts = self.out.shape
        rows = current if previous is None else torch.cat([current, previous + experts])
        ran = self.sparse.index_select(0, rows).sum(0)
        mixed = torch.addmm(ran, m.to(self.dense.dtype), self.dense)
        return torch.addmm(mixed[:, inner:], gelu(mixed[:, :inner]), self.out)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.dense, self.sparse, self.out))


def make_heads(tensors: dict[int, dict[str, torch.Tensor]], device: torch.device) -> dict[int, Head]:
    """Owner -> head on `device`, from its fc1 [P, H + 2E], fc2 [E, P] and linear_init [E, H + 2E], which are copied."""
    layouts = []
    for parts in tensors.values():
        (inner, wide), experts, dtype = parts["fc1"].shape, len(parts["fc2"]), parts["fc1"].dtype
        hidden, both = wide - 2 * experts, inner + experts
        layouts += [((both, hidden), dtype), ((2 * experts, both), dtype), ((experts, inner), dtype)]
    memory = iter(empty_together(layouts, device))
    return {owner: _fill(parts, *(next(memory) for _ in range(3))) for owner, parts in tensors.items()}


def _fill(parts: dict[str, torch.Tensor], dense: torch.Tensor, sparse: torch.Tensor, out: torch.Tensor) -> Head:
    """The head of `parts` in memory for dense [P + E, H], sparse [2E, P + E] and out [E, P]."""
    hidden = dense.shape[1]
    whole = torch.cat([parts["fc1"], parts["linear_init"]])
    dense.copy_(whole[:, :hidden])
    sparse.copy_(whole[:, hidden:].t())
    out.copy_(parts["fc2"])
    return Head(dense.t(), sparse, out.t())  # views: products are fastest along the rows of a file's matrices


@dataclass(frozen=True)
class HeadFile:
    """What a file of heads holds: owner's decoder layer -> (fc1, fc2, linear_init), and its metadata, flat."""

    tensors: dict[int, dict[str, torch.Tensor]]
    metadata: dict[str, str] = field(default_factory=dict)


def read_heads(path: Path) -> HeadFile:
    """Raises StoreError, naming the file and the tensor, when it is damaged or holds anything but whole heads."""
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    found, metadata = read_adapter(path)
    for key, tensor in found.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise StoreError(f"{path}: {key} is no part of a prerouter head")
        tensors.setdefault(int(match[1]), {})[match[2]] = tensor
    for owner, parts in tensors.items():
        missing = {"fc1", "fc2"} - parts.keys()
        if missing:
            raise StoreError(f"{path}: the head of layer {owner} lacks {', '.join(sorted(missing))}")
        if "linear_init" not in parts:
            parts["linear_init"] = parts["fc1"].new_zeros(len(parts["fc2"]), parts["fc1"].shape[1])
    return HeadFile(dict(sorted(tensors.items())), metadata)


def write_heads(path: Path, heads: HeadFile) -> None:
    """Write `path` whole or not at all."""
    tensors = {f"layers.{owner}.{part}.weight": tensor
               for owner, parts in heads.tensors.items() for part, tensor in parts.items()}  # fmt: skip
    write_adapter(path, tensors, heads.metadata)
