"""A 4-bit matrix is nibbles in a named packing plus bf16 (scale, zero) pairs; every packing unpacks to the same
nibbles.

A weight W [N, K] is quantised in groups of G along K: W ~ (q - 8) * scale + zero with q in 0..15. `scales_and_zeros` is
[K / G, N, 2] bf16. Packings of q [N, K] into uint8 [N, K / 2]:

- `plain`: row-major, two neighbours along K a byte, the even one low. Any shape, any device.
- `avx512`, `avx2`: what torch's `_weight_int4pack_mm_for_cpu` reads on a processor with that capability (PyTorch,
  aten/src/ATen/native/cpu/int4mm_kernel.cpp). Rows in blocks of 64 or 32; needs N % 16 == 0 and G in 32, 64, 128, 256.

- `tensor_core`: what torch's `_weight_int4pack_mm` reads on CUDA from compute capability 8.0 on. Made by torch, on the device,
  and never unpacked: for what is packed anew at every load. Needs N % 8 == 0, K % 128 == 0 and G in 32, 64, 128, 256.

The processor-dependent packings are computed here, not asked of torch, so that a store written on one machine can be
repacked on another.
"""

from __future__ import annotations

from functools import cache

import torch

GROUP_SIZES = (64, 32, 16, 8, 4, 2)
_CPU_BLOCK = {"avx512": 64, "avx2": 32}
_TILES = 8  # of 16 weights along K, side by side in `tensor_core`
_AT_ONCE = 2**24  # weights unpacked at a time: what a large matrix takes beside its own bytes stays small


def native_packing() -> str:
    """The packing this machine's CPU kernel reads, or `plain` where torch has none."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability if capability in _CPU_BLOCK else "plain"


@cache
def loading_packing(device: torch.device) -> str:
    """The fastest packing for what is packed anew for `device` at every load: found out by a product where that is CUDA."""
    if device.type == "cpu":
        return native_packing()
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "plain"
    q = torch.arange(16 * 128, dtype=torch.int64, device=device).remainder(16).to(torch.uint8).view(16, 128)
    scales = torch.full((2, 16, 2), 0.5, dtype=torch.bfloat16, device=device)
    x = torch.linspace(-1, 1, 256, dtype=torch.bfloat16, device=device).view(2, 128)
    wanted = x.float() @ _scale(q, scales).t()
    try:
        got = matmul(x, pack(q, "tensor_core"), scales, "tensor_core").float()
    except RuntimeError:  # a torch without this kernel
        return "plain"
    return "tensor_core" if (got - wanted).norm() < 0.02 * wanted.norm() else "plain"


def choose_group(in_features: int) -> int:
    """The largest supported group that divides `in_features`; the whole row when none does."""
    return next((g for g in GROUP_SIZES if in_features % g == 0), in_features)


def choose_packing(shape: tuple[int, int], group: int, packing: str) -> str:
    """`packing` where its kernel can multiply a matrix of this [N, K] shape, else `plain`."""
    rows, columns = (8, 16 * _TILES) if packing == "tensor_core" else (16, 1)
    able = shape[0] % rows == 0 and shape[1] % columns == 0 and group in (32, 64, 128, 256)
    return packing if able else "plain"


def _blocks(rows: int, packing: str) -> list[tuple[int, int, list[int], list[int]]]:
    """(first row, rows, low-nibble rows, high-nibble rows) of each row block of a CPU packing."""
    size = _CPU_BLOCK[packing]
    result = []
    for first in range(0, rows, size):
        n = min(size, rows - first)
        if n == size and packing == "avx512":  # bytes 0..15 hold rows d and d+32, bytes 16..31 rows d+16 and d+48
            low = [*range(0, 16), *range(16, 32)]
            high = [*range(32, 48), *range(48, 64)]
        elif n == size:  # avx2: byte d holds rows d and d+16
            low, high = [*range(0, 16)], [*range(16, 32)]
        else:  # a short last block pairs neighbouring rows
            low, high = [*range(0, n, 2)], [*range(1, n, 2)]
        result.append((first, n, low, high))
    return result


def pack(q: torch.Tensor, packing: str) -> torch.Tensor:
    """q [N, K] uint8 with values 0..15 -> uint8 [N, K / 2] in `packing`."""
    rows, columns = q.shape
    if packing == "plain":
        return q[:, 0::2] | (q[:, 1::2] << 4)
    if packing == "tensor_core":
        pairs = (q[:, 0::2] << 4) | q[:, 1::2]
        return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), _TILES).view(torch.uint8).view(rows, columns // 2)
    parts = []
    for first, n, low, high in _blocks(rows, packing):
        block = q[first : first + n]
        parts.append((block[low] | (block[high] << 4)).t().reshape(-1))  # [K, n / 2], a column of the block at a time
    return torch.cat(parts).view(rows, columns // 2)


def unpack(packed: torch.Tensor, packing: str) -> torch.Tensor:
    """Inverse of `pack`: uint8 [N, K / 2] -> q [N, K] uint8."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if packing == "plain":
        return torch.stack((packed & 15, packed >> 4), dim=-1).view(rows, columns)
    q = torch.empty(rows, columns, dtype=torch.uint8, device=packed.device)
    flat = packed.reshape(-1)
    for first, n, low, high in _blocks(rows, packing):
        block = flat[first * columns // 2 : (first + n) * columns // 2].view(columns, n // 2).t()
        target = q[first : first + n]
        target[low] = block & 15
        target[high] = block >> 4
    return q


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Slices of a matrix's rows, each of at most about 16 million weights; every packing packs each on its own."""
    step = max(1, _AT_ONCE // columns // 64) * 64
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def repack(packed: torch.Tensor, old: str, new: str) -> torch.Tensor:
    """Turn `packed` uint8 [N, K / 2] from packing `old` into `new` in place, a block of rows at a time; returns it."""
    if old != new:
        for block in row_blocks(packed.shape[0], packed.shape[1] * 2):
            packed[block] = pack(unpack(packed[block], old), new)
    return packed


def unpack_rows(packed: torch.Tensor, rows: torch.Tensor, packing: str) -> torch.Tensor:
    """Rows `rows` [n] int64 of the matrix in `packed` uint8 [N, K / 2] -> q [n, K] uint8; no other row is unpacked."""
    if packing == "plain":
        return unpack(packed[rows], packing)
    size, total = _CPU_BLOCK[packing], packed.shape[0]
    first = rows // size * size  # of the row's block
    width = (total - first).clamp_max(size) // 2  # bytes a column of the block takes
    row, paired = rows - first, total - first < size
    byte = torch.where(paired, row // 2, row % width)  # as in `_blocks`: a whole block pairs rows half of it apart
    high = torch.where(paired, row % 2, row // width)
    columns = torch.arange(packed.shape[1] * 2, device=packed.device)
    at = (first * packed.shape[1] + byte)[:, None] + columns * width[:, None]
    return (packed.view(-1)[at] >> (4 * high).to(torch.uint8)[:, None]) & 15


def dequantise(packed: torch.Tensor, scales_and_zeros: torch.Tensor, packing: str) -> torch.Tensor:
    """The matrix W [N, K] fp32 that `packed` and `scales_and_zeros` stand for."""
    return _scale(unpack(packed, packing), scales_and_zeros)


def dequantise_rows(
    packed: torch.Tensor, scales_and_zeros: torch.Tensor, rows: torch.Tensor, packing: str
) -> torch.Tensor:
    """Rows `rows` [n] int64 of that matrix, [n, K] fp32."""
    return _scale(unpack_rows(packed, rows, packing), scales_and_zeros[:, rows])


def _scale(q: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    rows, columns = q.shape
    groups = scales_and_zeros.shape[0]
    scale, zero = scales_and_zeros.float().permute(1, 0, 2).unsqueeze(2).unbind(-1)  # [N, groups, 1] each
    return ((q.view(rows, groups, columns // groups).float() - 8) * scale + zero).view(rows, columns)


def quantise(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """W [N, K] -> (q [N, K] uint8, scales_and_zeros [K / group, N, 2] bf16), fitted by hqq's half-quadratic solver.

    q is below 2^bits; fewer bits than 4 keep the meaning of a code: W ~ (q - 8) * scale + zero.

    A large matrix is fitted a block of rows at a time, for the solver holds several copies of what it fits in fp32.
    """
    parts = [_fit(weight[block], group, bits) for block in row_blocks(*weight.shape)]
    return torch.cat([q for q, _ in parts]), torch.cat([sz for _, sz in parts], dim=1)


def _fit(weight: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    from hqq.core.quantize import Quantizer  # heavy to import, needed only when quantising

    rows, columns = weight.shape
    q, meta = Quantizer.quantize(
        weight.float(), nbits=bits, group_size=group, axis=1, optimize=True, bitpack=False, device=str(weight.device)
    )
    scale, offset = meta["scale"].float(), meta["zero"].float()  # W ~ (q - offset) * scale, one row a group
    zero = (8 - offset) * scale
    scales_and_zeros = torch.cat((scale, zero), dim=1).view(rows, columns // group, 2).permute(1, 0, 2)
    return q.view(rows, columns).to(torch.uint8), scales_and_zeros.to(torch.bfloat16).contiguous()


def matmul(x: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, packing: str) -> torch.Tensor:
    """x [n, K] times W^T for a packed W [N, K] -> [n, N] in x.dtype.

    Uses torch's packed kernel where the packing is this processor's or `tensor_core`, else dequantises and multiplies.
    """
    if packing != "plain" and x.device.type == "cpu" and packing == native_packing():
        group = packed.shape[1] * 2 // scales_and_zeros.shape[0]
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, group, scales_and_zeros)
        return out.to(x.dtype)
    if packing == "tensor_core":
        rows, columns = packed.shape[0], packed.shape[1] * 2
        tiles = packed.view(torch.int32).view(rows // 8, columns // (16 * _TILES), 32, _TILES // 2)
        group = columns // scales_and_zeros.shape[0]
        return torch.ops.aten._weight_int4pack_mm(x.to(torch.bfloat16), tiles, group, scales_and_zeros).to(x.dtype)
    parts = [
        torch.nn.functional.linear(x, dequantise(packed[rows], scales_and_zeros[:, rows], packing).to(x.dtype))
        for rows in row_blocks(packed.shape[0], packed.shape[1] * 2)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
