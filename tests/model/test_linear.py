"""However many rows there are, an emulated linear gives what the linear gives, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from engine.model.linear import EmulatedLinear, emulate_linears


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (1, 100), (3, 40), (1,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("wide", "narrow"), [(2048, 2100), (96, 64), (96, 2)])
def test_rows_are_those_of_the_linear_in_fp32(shape, bias, wide, narrow, monkeypatch):
    monkeypatch.setattr("engine.model.linear._BLOCK", 2**20)  # several blocks of the larger ones
    torch.manual_seed(0)
    module = nn.Linear(wide, narrow, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(*shape, wide, dtype=torch.bfloat16)
    exact = nn.functional.linear(x.double(), module.weight.double(), module.bias.double() if bias else None)
    with torch.inference_mode():
        out = EmulatedLinear(module)(x)
    assert out.shape == exact.shape and out.dtype == torch.bfloat16
    assert_close(out.double(), exact, rtol=2**-8, atol=2**-10)  # half a step of bf16, and what fp32 sums differ by


def test_only_large_bf16_linears_that_are_no_routers_are_replaced_and_they_keep_their_parameters():
    large, small = nn.Linear(512, 512, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16)
    gate = nn.Linear(512, 512, dtype=torch.bfloat16)
    model = nn.ModuleDict({"large": large, "small": small, "exact": nn.Linear(512, 512), "gate": gate})
    emulate_linears(model)
    assert [type(module) for module in model.values()] == [EmulatedLinear, nn.Linear, nn.Linear, nn.Linear]
    assert model["large"].weight is large.weight and model["large"].bias is large.bias
