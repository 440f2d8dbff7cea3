"""The recovery LoRA is beside its linear, never in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.model.lora import Lora, LoraLinear, install_lora, place_lora, remove_lora
from tests.streaming import PROMPT, reference


def pair(dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 8, generator=generator).to(dtype), torch.randn(5, 3, generator=generator).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8), (2, 7, 8)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_side_path_is_added(bias, dtype, error, shape):
    linear, (a, b) = nn.Linear(8, 5, bias=bias).to(dtype), pair(dtype)
    x = torch.randn(shape).to(dtype)
    wanted = nn.functional.linear(x, linear.weight, linear.bias).float() + x.float() @ a.float().t() @ b.float().t()
    before = linear.weight.clone()
    y = LoraLinear(linear, a, b)(x)
    assert y.dtype == dtype and y.shape == (*shape[:-1], 5)
    assert (y.float() - wanted).norm() <= error * wanted.norm()
    assert torch.equal(linear.weight, before)


@torch.no_grad()
def test_placing_brings_it_to_its_linear_and_taking_it_off_leaves_nothing(checkpoint):
    model, name = reference(checkpoint("qwen2_moe"), torch.bfloat16), "model.layers.1.self_attn.o_proj"
    linear, ids = model.get_submodule(name), torch.tensor([PROMPT])
    plain, (a, b) = model(input_ids=ids).logits, (torch.randn(3, 64).half(), torch.randn(64, 3).half())
    placed = place_lora(model, Lora({name: (a, b)}, 2.0, {}), Path("lora.safetensors"))
    torch.testing.assert_close(placed.pairs[name], (a.bfloat16(), (b * 2).bfloat16()), rtol=0, atol=0)
    assert placed.bytes == 2 * (64 * 3 + 64 * 3)
    install_lora(model, placed)
    installed = model.get_submodule(name)
    assert installed.in_features == 64 and installed.a.data_ptr() == placed.pairs[name][0].data_ptr()  # held once
    assert not torch.equal(model(input_ids=ids).logits, plain)
    remove_lora(model, list(placed.pairs))
    assert model.get_submodule(name) is linear and torch.equal(model(input_ids=ids).logits, plain)
