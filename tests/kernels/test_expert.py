"""An expert's numbers for its tokens are bit for bit the same whichever experts are computed with it, in every format."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import silu

from engine.kernels.expert import ExpertKernel
from engine.kernels.formats import MatrixFormat
from engine.kernels.int4 import native_packing
from engine.memory.arena import SlotArena
from engine.store.layout import RecordLayout

EXPERTS = 7


def activate(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return silu(gate) * up


def make(kind: str, hidden: int, inner: int) -> tuple[ExpertKernel, list[dict[str, torch.Tensor]]]:
    """A kernel over a slot an expert, and what each record stands for, in fp32."""
    torch.manual_seed(hidden + inner)
    shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    forms = {name: MatrixFormat.choose(kind, shape, native_packing()) for name, shape in shapes.items()}
    layout = RecordLayout.make(forms, {"gate_up_bias": 2 * inner, "down_bias": hidden})
    arena, meant = SlotArena(EXPERTS, layout.record_bytes, torch.device("cpu")), []
    for slot in range(EXPERTS):
        tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
        tensors |= {f"{name}_bias": torch.randn(shape[0]) for name, shape in shapes.items()}
        arena.record(slot).copy_(layout.encode(tensors))
        views = layout.views(arena.record(slot))
        parts = {name: {s: views[name + s] for s in form.tensors()} for name, form in forms.items()}
        meant.append({name: forms[name].decode(parts[name]) for name in forms}
                     | {name: views[name].float() for name in views if name.endswith("bias")})  # fmt: skip
    return ExpertKernel(layout, arena, activate, None), meant


def wanted(meant: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = activate(x.float() @ meant["gate_up"].t() + meant["gate_up_bias"])
    return hidden @ meant["down"].t() + meant["down_bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (40, 20), (576, 32)])
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_an_experts_numbers_do_not_depend_on_the_others(kind, hidden, inner, dtype):
    kernel, meant = make(kind, hidden, inner)
    rows = [torch.randn(n, hidden).to(dtype) for n in (1, 2, 3, 5, 8, 17, 33)]
    alone = [kernel([slot], x, [len(x)]) for slot, x in enumerate(rows)]
    for got, expert, x in zip(alone, meant, rows, strict=True):
        assert got.dtype == dtype
        assert (got.float() - wanted(expert, x)).norm() < 0.02 * got.float().norm()
    draw = random.Random(1)
    for _ in range(20):
        slots = draw.sample(range(EXPERTS), draw.randint(1, EXPERTS))
        got = kernel(slots, torch.cat([rows[slot] for slot in slots]), [len(rows[slot]) for slot in slots])
        assert torch.equal(got, torch.cat([alone[slot] for slot in slots]))
        one = kernel.for_one_token(slots, rows[0])
        assert torch.equal(one, torch.cat([kernel([slot], rows[0], [1]) for slot in slots]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 33])
def test_together_every_expert_computes_every_token(tokens, dtype):
    kernel, meant = make("bf16", 64, 32)
    x, slots = torch.randn(tokens, 64).to(dtype), [4, 0, 6]
    got = kernel.together(kernel.copy(slots), x)
    assert (got.shape, got.dtype) == ((3, tokens, 64), dtype)
    for out, slot in zip(got, slots, strict=True):
        expected = wanted(meant[slot], x)
        assert (out.float() - expected).norm() < (1e-5 if dtype == torch.float32 else 0.02) * expected.norm()


def test_only_small_experts_of_few_tokens_are_computed_together():
    small, large = make("bf16", 64, 32)[0], make("bf16", 576, 64)[0]
    assert small.computes_together(EXPERTS, 33)
    assert not small.computes_together(EXPERTS, 2048)
    assert not small.computes_together(0, 33)
    assert not large.computes_together(2, 2)
    assert not make("int4", 64, 32)[0].computes_together(EXPERTS, 33)
