"""The recovery LoRA stays beside the weights it repairs, never in them: y = W x + scale · B (A x).

Merging it into int4 weights would round away what it adds (Edge0, arXiv 2609.18063). A linear, quantised or not, is replaced
by a module that holds it and the side path; taking the LoRA off puts the very same linear back. Files are read in Edge0's
layout, `<module>.lora_A` [r, in] and `<module>.lora_B` [out, r], and in PEFT's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from engine.errors import StoreError
from engine.memory.block import empty_together
from engine.model.resident import Int4Matrix
from engine.model.skeleton import parent_of
from engine.store.adapter import read_adapter, write_adapter
from engine.store.mapping import module_path

FILE = "lora_edge0.safetensors"  # what training writes
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?(?:\.weight)?")
_ALPHA = 32.0  # of Edge0's published files, for those that do not say


@dataclass(frozen=True)
class Lora:
    """Module path -> (A [r, in], B [out, r]), and the factor of the side path."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float
    metadata: dict[str, str]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self.pairs.values() for t in pair)


class LoraLinear(nn.Module):
    """x [..., in] -> [..., out], both in the inner linear's dtype, which A [r, in] and B [out, r], times the scale, have."""

    def __init__(self, inner: nn.Module, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        # Plain attributes, not buffers, which take a search to find: the products are small, and there are hundreds a token.
        self.a, self.b = a.t(), b.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)  # nobody else holds it
        y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]).mm(self.a), self.b)
        return y

    def __getattr__(self, name: str):
        """Blocks may read a linear's own attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def read_lora(path: Path) -> Lora:
    """Raises StoreError, naming the file and the tensor, for anything that is no pair of A and B."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    tensors, metadata = read_adapter(path)
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise StoreError(f"{path}: {key} is no part of a LoRA")
        halves.setdefault(match[1], {})[match[2]] = tensor
    pairs = {}
    for name, half in halves.items():
        if len(half) < 2:
            raise StoreError(f"{path}: {name} has no lora_{'B' if 'A' in half else 'A'}")
        if half["A"].shape[0] != half["B"].shape[1]:
            raise StoreError(
                f"{path}: the ranks of {name} differ: A {tuple(half['A'].shape)}, B {tuple(half['B'].shape)}"
            )
        pairs[name] = half["A"], half["B"]
    if not pairs:
        raise StoreError(f"{path} holds no LoRA")
    return Lora(pairs, _scale(path, metadata, pairs), metadata)


def _scale(path: Path, metadata: dict[str, str], pairs: dict) -> float:
    """alpha / r, from the file's metadata or the adapter_config.json that PEFT writes beside it."""
    rank = next(iter(pairs.values()))[0].shape[0]
    beside = path.with_name("adapter_config.json")
    settings = json.loads(beside.read_text()) if beside.is_file() else {}
    return float(metadata.get("alpha", settings.get("lora_alpha", _ALPHA))) / float(metadata.get("r", rank))


def write_lora(path: Path, lora: Lora) -> None:
    """Write `path` in Edge0's layout, whole or not at all. The metadata gets r and alpha."""
    tensors = {
        f"{name}.lora_{half}": t for name, pair in lora.pairs.items() for half, t in zip("AB", pair, strict=True)
    }
    rank = next(iter(lora.pairs.values()))[0].shape[0]
    write_adapter(path, tensors, {**lora.metadata, "r": str(rank), "alpha": str(lora.scale * rank)})


def place_lora(model: nn.Module, lora: Lora, path: Path) -> Lora:
    """`lora` by the module paths of `model`, each pair in its linear's dtype and on its device, the scale in B.

    Raises StoreError naming the first target that the model lacks, that is no linear, or that has another shape.
    """
    places = {_find(model, name, path): pair for name, pair in lora.pairs.items()}
    layouts = []
    for name, (a, b) in places.items():
        inner = model.get_submodule(name)
        wide, high = getattr(inner, "in_features", None), getattr(inner, "out_features", None)
        if wide is None or high is None:
            raise StoreError(f"{path}: {name} is no linear")
        if (a.shape[1], b.shape[0]) != (wide, high):
            raise StoreError(f"{path}: {name} maps {wide} to {high}, its LoRA {a.shape[1]} to {b.shape[0]}: it is another "
                             "model's")  # fmt: skip
        dtype = inner.dtype if isinstance(inner, Int4Matrix) else inner.weight.dtype
        layouts += [(tuple(half.shape), dtype) for half in (a, b)]
    memory = iter(empty_together(layouts, next(model.parameters()).device))
    pairs = {
        name: (next(memory).copy_(a), next(memory).copy_(b.float() * lora.scale)) for name, (a, b) in places.items()
    }
    return replace(lora, pairs=pairs, scale=1.0)


def install_lora(model: nn.Module, lora: Lora) -> None:
    """Put the side paths of a placed LoRA beside their linears."""
    for name, (a, b) in lora.pairs.items():
        parent, attribute = parent_of(model, name)
        setattr(parent, attribute, LoraLinear(getattr(parent, attribute), a, b))


def remove_lora(model: nn.Module, places: list[str]) -> None:
    """Put the linears at the module paths `places` back."""
    for name in places:
        parent, attribute = parent_of(model, name)
        setattr(parent, attribute, getattr(parent, attribute).inner)


def _find(model: nn.Module, name: str, path: Path) -> str:
    """The module path in `model` of what the file calls `name`: checkpoints may have other names, composite ones longer."""
    modules = {module for module, _ in model.named_modules()}
    bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    for known in (bare, f"model.{bare}", f"model.language_model.{bare}", module_path(model, f"model.{bare}")):
        if known in modules:
            return known
    raise StoreError(f"{path}: the model has no module {name}: the LoRA is another model's")
