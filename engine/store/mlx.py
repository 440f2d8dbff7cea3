"""A checkpoint that MLX quantised is read as the model it stands for, and its 4-bit codes are kept to the bit.

A quantised weight W [out, in] at `<path>` is three tensors (mlx-lm's affine mode, group 64):

| tensor | dtype, shape | |
|---|---|---|
| `<path>.weight` | uint32 [out, in * bits / 32] | codes, the least significant bits first |
| `<path>.scales`, `<path>.biases` | bf16 [out, in / 64] | W = code * scale + bias; a scale may be negative |

Experts are stacked: [E, out, ...] under `switch_mlp` or `experts`, `gate_proj` apart from `up_proj`.

Four bits read as bytes are `int4.py`'s plain packing, and W = (code - 8) * scale + zero with zero = bias + 8 * scale, in
bf16. That sum is exact where -bias / scale lies between 4 and 16 (the difference of numbers within a factor of two is), and
MLX's quantiser puts it between 8 and 15 for every group whose weights have both signs. Elsewhere zero is rounded, by at
most 2^-8 of itself; it lies among the group's weights, so that is what bf16 rounds of the largest of them.
Scales in fp16, of old conversions, are rounded to bf16 as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from engine.errors import SourceError, UnsupportedModelError
from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.store.checkpoint import Checkpoint
from engine.store.mapping import Unit

_GROUP = 64
_BITS = (4, 8)
_PARTS = ("weight", "scales", "biases")
_DROPPED = re.compile(r"(?:^|\.)(?:mtp|[^.]*(?:vision|visual)[^.]*)\.")  # what serves neither text nor the next token
_STACKED = re.compile(r"(.+)\.(?:switch_mlp|experts)\.(gate|up|down)_proj")
_SINGLE = re.compile(r".+\.experts\.\d+\..+")
# MLX stores what the norm multiplies by; these architectures' transformers classes multiply by 1 + weight.
_ONE_PLUS = {"qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"}
_ONE_PLUS_NORMS = re.compile(
    r".*(?:input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight|model\.norm\.weight"
)


def is_mlx(quantisation: dict) -> bool:
    """Whether config.json's account of a quantisation is mlx-lm's."""
    return "quant_method" not in quantisation and {"group_size", "bits"} <= quantisation.keys()


@dataclass(frozen=True)
class _Part:
    """A weight in the checkpoint: its path and bits, None where it is not quantised."""

    path: str
    bits: int | None


class MlxCheckpoint:
    """An MLX checkpoint under the names and with the values of a plain one, see `Checkpoint`.

    `tensors` reads the files; `quantisation`: config.json's account; `model`: the skeleton. Experts are one tensor a
    matrix for all of them, as the model holds them. Raises SourceError or UnsupportedModelError for what it cannot read.
    """

    def __init__(self, tensors: Checkpoint, quantisation: dict, model: nn.Module) -> None:
        self._tensors, self._model = tensors, model
        self._quantisation, self._name = quantisation, tensors.source.name
        self._one_plus = model.config.model_type in _ONE_PLUS
        self._weights: dict[str, tuple[_Part, ...]] = {}  # name -> what its rows are made of, in order
        self._plain: dict[str, str] = {}  # name -> the tensor that it is
        self.release = tensors.release
        self._check(quantisation, "the checkpoint")
        self._collect()

    # -- as a checkpoint ---------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[str]:
        return [*self._weights, *self._plain]

    def shards_of(self, key: str) -> set[str]:
        if key in self._plain:
            return self._tensors.shards_of(self._plain[key])
        names = [name for part in self._weights[key] for name in _stored(part)]
        return set().union(*(self._tensors.shards_of(name) for name in names))

    def read(self, key: str, row: int | None) -> torch.Tensor:
        """As `Checkpoint.read`; a quantised weight in fp32."""
        if key in self._weights:
            parts = [self._dequantise(part, row) for part in self._weights[key]]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        tensor = self._tensors.read(self._plain[key], row)
        if tensor.dtype == torch.uint32:
            path = self._plain[key].removesuffix(".weight")
            raise SourceError(f"{self._name}: {path}.weight is quantised, but {path}.scales is missing; "
                              "download the checkpoint again")  # fmt: skip
        if key.endswith("conv1d.weight") and tensor.ndim == 3 and tensor.shape[1] != 1:
            return tensor.transpose(1, 2)  # MLX has the channels last
        if self.needs_fp32(key):
            return tensor.float() - 1  # in fp32, where adding the 1 again gives the checkpoint's number back
        return tensor

    def needs_fp32(self, key: str) -> bool:
        """Whether `key` is the weight of a norm that multiplies by 1 + weight, which bf16 cannot always take the 1 off."""
        return self._one_plus and _ONE_PLUS_NORMS.fullmatch(key) is not None

    def codes(self, unit: Unit) -> dict[str, dict[str, torch.Tensor]] | None:
        """The tensors of `unit` by name as int4 codes (`.q` in the plain packing, `.sz`); None unless all are 4-bit."""
        if any(recipe.converter is not None for recipe in unit.recipes):
            return None
        targets = {recipe.target: key for recipe in unit.recipes for key in recipe.all_keys()}
        row = None if unit.expert is None else unit.expert[1]
        if not all(self.holds_codes(key) for key in targets.values()):
            return None
        made = {target: self._codes(self._weights[key], row) for target, key in targets.items()}
        if unit.expert is None:
            return made
        return {target.rpartition(".")[2].removesuffix("_proj"): codes for target, codes in made.items()}

    # -- what it says of itself --------------------------------------------------------------------------------------

    def holds_codes(self, key: str) -> bool:
        """Whether the weight `key` is in 4 bits."""
        return all(part.bits == 4 for part in self._weights.get(key, (_Part("", None),)))

    def expert_bits(self) -> int | None:
        """Bits of the experts' weights, of the finest ones where they differ; None where they are not quantised."""
        found = {part.bits for name, parts in self._weights.items() if _is_experts(name) for part in parts}
        return max(found - {None}, default=None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        stacked: dict[str, dict[str, _Part]] = {}
        names = set(self._tensors.keys)
        for name in self._tensors.keys:
            path, _, leaf = name.rpartition(".")
            if _DROPPED.search(name):
                continue
            if leaf in ("scales", "biases"):
                for wanted in _PARTS:
                    if f"{path}.{wanted}" not in names:
                        raise SourceError(f"{self._name}: {path} is quantised, but {path}.{wanted} is missing; "
                                          "download the checkpoint again")  # fmt: skip
                continue
            bare = name.removeprefix("language_model.")
            quantised = leaf == "weight" and f"{path}.scales" in names
            match = _STACKED.fullmatch(bare.rpartition(".")[0])
            if match and leaf == "weight":
                stacked.setdefault(match[1], {})[match[2]] = _Part(path, self._bits(path) if quantised else None)
            elif match or (quantised and _SINGLE.fullmatch(bare)):
                raise UnsupportedModelError(f"{self._name}: {name} is part of an expert in a way that is not known")
            elif quantised:
                self._weights[bare] = (_Part(path, self._bits(path)),)
            else:
                self._plain[bare] = name
        for prefix, parts in stacked.items():
            first = ("gate", "up") if "gate" in parts else ("up",)
            for wanted in (*first, "down"):
                if wanted not in parts:
                    raise SourceError(f"{self._name} lacks {wanted}_proj of the experts of {prefix}")
            self._weights[f"{prefix}.experts.{'_'.join(first)}_proj"] = tuple(parts[name] for name in first)
            self._weights[f"{prefix}.experts.down_proj"] = (parts["down"],)

    def _bits(self, path: str) -> int:
        """Bits of the quantised weight at `path`, which may be listed apart from the others."""
        listed = (self._quantisation.get(name) for name in (path, path.removeprefix("language_model.")))
        own = next((entry for entry in listed if isinstance(entry, dict)), self._quantisation)
        return self._check({**self._quantisation, **own}, path)

    def _check(self, quantisation: dict, what: str) -> int:
        group, bits, mode = quantisation["group_size"], quantisation["bits"], quantisation.get("mode", "affine")
        if group != _GROUP or bits not in _BITS or mode != "affine":
            raise SourceError(f"{self._name}: {what} is quantised to {bits} bits in groups of {group} ({mode}); only affine "
                              f"{' and '.join(map(str, _BITS))} bits in groups of {_GROUP} can be read: choose such a "
                              "checkpoint, or the original")  # fmt: skip
        return bits

    def _triple(self, part: _Part, row: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes as bytes [..., out, in * bits / 8], scales and biases [..., out, in / 64]; checked against each other."""
        weight, scales, biases = (self._tensors.read(name, row) for name in _stored(part))
        if weight.dtype != torch.uint32 or weight.shape[-1] * 32 != scales.shape[-1] * _GROUP * part.bits:
            raise SourceError(f"{self._name}: {part.path}.weight {tuple(weight.shape)} {_short(weight)} with scales "
                              f"{tuple(scales.shape)} is not {part.bits} bits in groups of {_GROUP}, as its config.json "
                              "says")  # fmt: skip
        for name, tensor in (("scales", scales), ("biases", biases)):
            if tensor.shape != (*weight.shape[:-1], scales.shape[-1]) or not tensor.is_floating_point():
                raise SourceError(f"{self._name}: {part.path}.{name} is {tuple(tensor.shape)} {_short(tensor)}, which does "
                                  f"not go with its weight {tuple(weight.shape)}")  # fmt: skip
        return weight.contiguous().view(torch.uint8), scales, biases

    def _dequantise(self, part: _Part, row: int | None) -> torch.Tensor:
        if part.bits is None:
            return self._tensors.read(f"{part.path}.weight", row)
        q, scales, biases = self._triple(part, row)
        if part.bits == 4:
            q = torch.stack((q & 15, q >> 4), dim=-1)
        groups = q.reshape(*scales.shape, _GROUP).float()
        return groups.mul_(scales.float().unsqueeze(-1)).add_(biases.float().unsqueeze(-1)).flatten(-2)

    def _codes(self, parts: tuple[_Part, ...], row: int | None) -> dict[str, torch.Tensor]:
        triples = [self._triple(part, row) for part in parts]
        q, scales, biases = (torch.cat(tensors, dim=-2) if len(parts) > 1 else tensors[0] for tensors in zip(*triples))
        if row is not None:
            q, scales, biases = q[0], scales[0], biases[0]
        zeros = biases.float() + 8 * scales.float()
        sz = torch.stack((scales.float(), zeros), dim=-1).permute(1, 0, 2)
        return {".q": q, ".sz": sz.to(torch.bfloat16).contiguous()}


def in_packing(codes: dict[str, torch.Tensor], form: MatrixFormat) -> dict[str, torch.Tensor]:
    """Plainly packed codes in the packing of `form`."""
    return {**codes, ".q": int4.repack(codes[".q"].clone(), "plain", form.packing)}


def _stored(part: _Part) -> list[str]:
    return [f"{part.path}.{name}" for name in (_PARTS if part.bits else _PARTS[:1])]


def _is_experts(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"))


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
