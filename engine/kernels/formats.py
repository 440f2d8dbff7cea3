"""A weight matrix is encoded into named tensors by its format, and a format multiplies what it encoded.

| format | tensors of W [N, K] | meaning |
|---|---|---|
| bf16 | `` [N, K] bf16 | W rounded |
| int8 | `.q` [N, K] int8, `.scale` [N] bf16 | W ~ q * scale, symmetric, one scale a row |
| int4 | `.q` [N, K / 2] uint8, `.sz` [K / G, N, 2] bf16 | see `int4.py` |
| int3, int2 | `.q` [N K bits / 8] uint8, `.sz` [K / G, N, 2] bf16 | drafts only: see `fold.py` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from engine.kernels import int4
from engine.kernels.fold import fold, unfold

_NIBBLES = {"int4": 4, "int3": 3, "int2": 2}  # kinds whose codes a nibble holds, and their bits
# Rows from which a bf16 product is computed in fp32 on processors without bf16 arithmetic: converting the matrix once
# costs about as much as one emulated bf16 product of this many rows (measured on AVX-512 without the bf16 extension).
_FP32_ROWS = 8
_FP32_ROWS_CACHED, _CACHED = 2, 2**19  # the same for a matrix of so few weights that its fp32 copy stays in the cache
# Weights from which a bf16 product with a vector is faster there than one with a matrix of one row (measured: as fast at
# 1536 x 576, 1.6 times as fast at 2048 x 2048).
VECTOR_WEIGHTS = 2**20
_WIDE_ROWS = 16  # from which a batched fp32 product over long rows is several times faster with the weights on the left


@dataclass(frozen=True)
class MatrixFormat:
    """Format of one matrix. kind: see above; shape: [N, K] = (out, in); group and packing: int4 and below."""

    kind: str
    shape: tuple[int, int]
    group: int = 0
    packing: str = ""

    @staticmethod
    def choose(kind: str, shape: tuple[int, int], packing: str) -> MatrixFormat:
        """The format for a matrix of this shape, in the given machine packing where its shape allows."""
        if kind not in _NIBBLES:
            return MatrixFormat(kind, shape)
        if shape[1] % 2:
            raise ValueError(f"{kind} needs an even number of input features, got {shape[1]}")
        if kind != "int4" and shape[0] * shape[1] % 8:
            raise ValueError(f"{kind} needs a multiple of 8 weights, got {shape[0]} x {shape[1]}")
        group = int4.choose_group(shape[1])
        return MatrixFormat(kind, shape, group, int4.choose_packing(shape, group, packing))

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Suffix -> (dtype, shape) of what `encode` returns."""
        rows, columns = self.shape
        if self.kind == "bf16":
            return {"": (torch.bfloat16, (rows, columns))}
        if self.kind == "int8":
            return {".q": (torch.int8, (rows, columns)), ".scale": (torch.bfloat16, (rows,))}
        codes = (rows, columns // 2) if self.kind == "int4" else (rows * columns * _NIBBLES[self.kind] // 8,)
        return {".q": (torch.uint8, codes), ".sz": (torch.bfloat16, (columns // self.group, rows, 2))}

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """W [N, K], any float dtype -> the tensors of this format by suffix."""
        if self.kind == "bf16":
            return {"": weight.to(torch.bfloat16)}
        if self.kind == "int8":
            scale = (weight.float().abs().amax(dim=1) / 127).clamp_min(1e-12).to(torch.bfloat16)
            q = (weight.float() / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
            return {".q": q, ".scale": scale}
        return self.encode_codes(*int4.quantise(weight, self.group, _NIBBLES[self.kind]))

    def encode_codes(self, q: torch.Tensor, scales_and_zeros: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes q [N, K] uint8 and their scales and zeros [K / G, N, 2] -> the tensors of this format, int4 and below."""
        packed = int4.pack(q, self.packing)
        return {".q": packed if self.kind == "int4" else fold(packed.view(-1), _NIBBLES[self.kind]), ".sz": scales_and_zeros}

    def codes(self, packed: torch.Tensor) -> torch.Tensor:
        """The codes q [N, K] uint8 in a `.q` of this format, int4 and below."""
        return int4.unpack(self._nibbles(packed), self.packing)

    def _nibbles(self, packed: torch.Tensor) -> torch.Tensor:
        if self.kind == "int4":
            return packed
        return unfold(packed, _NIBBLES[self.kind]).view(self.shape[0], self.shape[1] // 2)

    def decode(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The matrix [N, K] fp32 that the encoded tensors stand for."""
        if self.kind == "bf16":
            return tensors[""].float()
        if self.kind == "int8":
            return tensors[".q"].float() * tensors[".scale"].float()[:, None]
        return int4.dequantise(self._nibbles(tensors[".q"]), tensors[".sz"], self.packing)

    def matmul(self, device: torch.device) -> Callable[..., torch.Tensor]:
        """The function (x [n, K], *encoded tensors in the order of `tensors()`) -> x W^T [n, N], in x.dtype."""
        if self.kind == "bf16":
            return _bf16_emulated if emulates_bf16(device) else _bf16
        if self.kind == "int8":
            # torch's kernel reads rows 16 weights at a time, past the end where they are of another length
            return _int8_packed if device.type == "cpu" and self.shape[1] % 16 == 0 else _int8
        if self.kind == "int4":
            return lambda x, q, sz, packing=self.packing: int4.matmul(x, q, sz, packing)
        return lambda x, q, sz: int4.matmul(x, self._nibbles(q), sz, self.packing)

    def batched_matmul(self, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """The function (x [n, K] or [B, n, K], B weights [B, N, K]) -> [B, n, N] in x.dtype; None but for bf16.

        What it computes for one of the B may differ in rounding with the others: torch's threads share the whole batch.
        """
        if self.kind != "bf16":
            return None
        return _bf16_batched_emulated if emulates_bf16(device) else _bf16_batched


def emulates_bf16(device: torch.device) -> bool:
    """Whether `device` is a processor that cannot multiply bf16 numbers by itself."""
    return device.type == "cpu" and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight) if x.dtype == torch.bfloat16 else linear(x, weight.to(x.dtype))


def _bf16_emulated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bfloat16 and x.shape[0] == 1 and weight.numel() >= VECTOR_WEIGHTS:
        return torch.mv(weight, x[0]).unsqueeze(0)
    rows = _FP32_ROWS_CACHED if weight.numel() <= _CACHED else _FP32_ROWS
    if x.dtype == torch.bfloat16 and x.shape[0] < rows:
        return linear(x, weight)
    return linear(x.float(), weight.float()).to(x.dtype)


def _bf16_batched(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.expand(len(weights), -1, -1), weights.to(x.dtype).transpose(1, 2))


def _bf16_batched_emulated(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    experts, out_features, in_features = weights.shape
    if x.shape[-2] < _WIDE_ROWS or out_features > in_features:
        return _bf16_batched(x.float(), weights.float()).to(x.dtype)
    columns = x.float().transpose(-1, -2).contiguous().expand(experts, -1, -1)
    return torch.bmm(weights.float(), columns).to(x.dtype).transpose(1, 2)


def _int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return linear(x, q.to(x.dtype)) * scale.to(x.dtype)


def _int8_packed(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < _FP32_ROWS:
        return torch.ops.aten._weight_int8pack_mm(x.to(torch.bfloat16), q, scale).to(x.dtype)
    return (linear(x.float(), q.float()) * scale.float()).to(x.dtype)
