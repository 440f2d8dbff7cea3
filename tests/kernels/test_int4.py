"""int4 packings are torch's own, unpack to the same nibbles everywhere, and multiply to the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels import int4

PROJECT = Path(__file__).resolve().parents[2]
PACKINGS = ("plain", "avx512", "avx2")
# Rows: whole blocks of 64 and 32, short last blocks, fewer than a block.
SHAPES = [(64, 64), (128, 32), (192, 128), (96, 64), (80, 64), (48, 32), (32, 64), (16, 64)]

# Packs random nibbles with torch and with us under the capability the environment sets, and compares.
AGAINST_TORCH = """
import sys, torch
from engine.kernels import int4
packing = int4.native_packing()
if packing != sys.argv[1]:
    sys.exit(f"this processor has {packing}")
for rows, columns in eval(sys.argv[2]):
    torch.manual_seed(rows + columns)
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
    assert torch.equal(int4.pack(q, packing), theirs), (rows, columns)
    group = 32
    sz = torch.randn(columns // group, rows, 2).mul(0.1).to(torch.bfloat16)
    x = torch.randn(5, columns).to(torch.bfloat16)
    wanted = x.float() @ int4.dequantise(theirs, sz, packing).t()
    got = int4.matmul(x, int4.pack(q, packing), sz, packing).float()
    assert (got - wanted).norm() < 0.01 * wanted.norm(), (rows, columns)
print("same")
"""


def nibbles(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packings_round_trip(packing, shape):
    q = nibbles(*shape)
    packed = int4.pack(q, packing)
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (shape[0], shape[1] // 2))
    assert torch.equal(int4.unpack(packed, packing), q)


@pytest.mark.parametrize("packing", ["avx512", "avx2"])
def test_packings_are_torchs_own(packing):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": packing}
    command = [sys.executable, "-c", AGAINST_TORCH, packing, repr(SHAPES)]
    result = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    if "this processor has" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.stdout == "same\n", result.stderr


@pytest.mark.parametrize("group", [64, 32, 8])
def test_quantising_stays_within_half_a_step(group):
    torch.manual_seed(group)
    weight = torch.randn(48, 128) * torch.rand(48, 1)
    q, sz = int4.quantise(weight, group)
    assert (q.dtype, sz.dtype, tuple(sz.shape)) == (torch.uint8, torch.bfloat16, (128 // group, 48, 2))
    assert int(q.max()) <= 15
    back = int4.dequantise(int4.pack(q, "plain"), sz, "plain")
    spans = weight.view(48, -1, group)
    step = ((spans.amax(-1) - spans.amin(-1)) / 15).repeat_interleave(group, dim=1)
    off = (back - weight).abs() / step
    assert off.mean() < 0.3  # a quarter of a step is what uniform rounding errors average
    assert off.max() < 2  # hqq lets outliers go further to fit the rest better


def test_constant_groups_survive():
    weight = torch.zeros(16, 64)
    weight[3] = 0.5
    q, sz = int4.quantise(weight, 64)
    back = int4.dequantise(int4.pack(q, "plain"), sz, "plain")
    assert torch.isfinite(back).all()
    assert (back - weight).abs().max() < 0.01


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing_multiplies_to_the_same_numbers(packing):
    torch.manual_seed(0)
    weight, x = torch.randn(96, 128), torch.randn(5, 128)
    q, sz = int4.quantise(weight, 64)
    wanted = x @ int4.dequantise(int4.pack(q, "plain"), sz, "plain").t()
    got = int4.matmul(x, int4.pack(q, packing), sz, packing)
    assert got.dtype == x.dtype
    native = packing == int4.native_packing()
    assert (got - wanted).norm() < (0.01 if native else 1e-5) * wanted.norm()


@pytest.mark.parametrize(("features", "group"), [(4096, 64), (96, 32), (48, 16), (40, 8), (2880, 64), (6, 2), (7, 7)])
def test_the_group_divides_the_features(features, group):
    assert int4.choose_group(features) == group


def test_shapes_the_kernel_cannot_multiply_are_packed_plainly():
    assert int4.choose_packing((64, 64), 64, "avx512") == "avx512"
    assert int4.choose_packing((60, 64), 64, "avx512") == "plain"
    assert int4.choose_packing((64, 48), 16, "avx2") == "plain"


def test_a_packing_is_chosen_only_where_its_kernel_can_multiply():
    able = {"avx512": (16, 64), "tensor_core": (8, 128)}
    for packing, shape in able.items():
        assert int4.choose_packing(shape, 64, packing) == packing
        assert int4.choose_packing(shape, 16, packing) == "plain"
    assert int4.choose_packing((8, 64), 64, "avx512") == int4.choose_packing((8, 192), 64, "tensor_core") == "plain"
    assert int4.loading_packing(torch.device("cpu")) == int4.native_packing()
