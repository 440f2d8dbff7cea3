"""Folding loses nothing in any packing, and what the folded formats stand for is what hqq fitted."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import int4
from engine.kernels.fold import fold, unfold
from engine.kernels.formats import MatrixFormat

PACKINGS = ("plain", "avx512", "avx2")
SHAPES = [(64, 64), (96, 64), (80, 32), (48, 128), (16, 64)]


def codes(shape: tuple[int, int], bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + bits)
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


def weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_unfolding_undoes_folding(shape, bits, packing):
    packed = int4.pack(codes(shape, bits), packing).view(-1)
    folded = fold(packed, bits)
    assert folded.dtype == torch.uint8
    assert folded.numel() == shape[0] * shape[1] * bits // 8
    assert torch.equal(unfold(folded, bits), packed)


@pytest.mark.parametrize("bits", [3, 2])
def test_every_bit_of_a_folded_matrix_counts(bits):
    """Unfolding is the inverse on both sides: no two folded matrices stand for the same codes."""
    folded = torch.randint(0, 256, (24 * bits,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    assert torch.equal(fold(unfold(folded, bits), bits), folded)


def test_at_four_bits_nothing_is_copied():
    packed = int4.pack(codes((16, 16), 4), "plain").view(-1)
    assert fold(packed, 4) is packed and unfold(packed, 4) is packed


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_format_decodes_to_what_hqq_fitted(shape, bits, packing):
    form = MatrixFormat.choose(f"int{bits}", shape, packing)
    q, scales_and_zeros = int4.quantise(weight(shape), form.group, bits)
    assert int(q.max()) < 2**bits
    encoded = form.encode(weight(shape))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in encoded.items()} == form.tensors()
    assert torch.equal(form.codes(encoded[".q"]), q)
    wanted = int4.dequantise(int4.pack(q, "plain"), scales_and_zeros, "plain")
    assert torch.equal(form.decode(encoded), wanted)


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.12), (3, 0.25), (2, 0.55)])
def test_fewer_bits_come_less_close(bits, bound):
    form = MatrixFormat.choose(f"int{bits}", (96, 64), "plain")
    error = (form.decode(form.encode(weight((96, 64)))) - weight((96, 64))).norm() / weight((96, 64)).norm()
    assert bound / 3 < error < bound


@pytest.mark.parametrize("packing", ["plain", int4.native_packing()])
@pytest.mark.parametrize("bits", [3, 2])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_multiplies_by_the_decoded_matrix(dtype, rows, bits, packing):
    form = MatrixFormat.choose(f"int{bits}", (96, 64), packing)
    encoded = form.encode(weight((96, 64)))
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
    got, wanted = form.matmul(torch.device("cpu"))(x, *encoded.values()), x.float() @ form.decode(encoded).t()
    assert got.dtype == dtype
    assert (got.float() - wanted).norm() < 0.01 * wanted.norm()


def test_shapes_that_do_not_fold_are_refused():
    with pytest.raises(ValueError, match="int3 needs a multiple of 8 weights, got 3 x 6"):
        MatrixFormat.choose("int3", (3, 6), "plain")
    with pytest.raises(ValueError, match="int2 needs an even number of input features, got 5"):
        MatrixFormat.choose("int2", (8, 5), "plain")
