"""A format's kernel multiplies by exactly the matrix its encoding stands for."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.formats import MatrixFormat
from engine.kernels.int4 import native_packing

CPU = torch.device("cpu")


def make(kind: str, shape=(96, 64), packing: str | None = None):
    form = MatrixFormat.choose(kind, shape, packing or native_packing())
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return form, weight, form.encode(weight)


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_multiplies_by_the_decoded_matrix(kind, rows, dtype):
    form, _, encoded = make(kind)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
    got = form.matmul(CPU)(x, *encoded.values())
    wanted = x.float() @ form.decode(encoded).t()
    assert got.dtype == dtype
    exact = kind == "bf16" and dtype == torch.float32
    assert (got.float() - wanted).norm() < (1e-6 if exact else 0.01) * wanted.norm()


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_the_encoding_has_the_tensors_it_announces(kind):
    form, _, encoded = make(kind)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in encoded.items()} == form.tensors()


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 0.003), ("int8", 0.01), ("int4", 0.12)])
def test_decoding_comes_close_to_the_matrix(kind, bound):
    form, weight, encoded = make(kind)
    assert (form.decode(encoded) - weight).norm() < bound * weight.norm()


def test_bf16_numbers_are_kept_exactly():
    form, weight, _ = make("bf16")
    weight = weight.to(torch.bfloat16).float()
    assert torch.equal(form.decode(form.encode(weight)), weight)


def test_a_row_of_zeros_survives_int8():
    form = MatrixFormat.choose("int8", (4, 8), "plain")
    assert torch.equal(form.decode(form.encode(torch.zeros(4, 8))), torch.zeros(4, 8))


def test_int4_refuses_an_odd_number_of_features():
    with pytest.raises(ValueError, match="even number of input features, got 33"):
        MatrixFormat.choose("int4", (64, 33), "plain")
