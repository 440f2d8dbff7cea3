"""Tensors that are made together lie in one piece of memory, apart from one another."""

from __future__ import annotations

import torch

from engine.memory.block import empty_together

LAYOUTS = [((3, 5), torch.float16), ((7,), torch.float32), ((2, 3, 4), torch.bfloat16), ((1, 1), torch.int64)]


def test_they_are_apart_aligned_and_in_one_mapping():
    tensors = empty_together(LAYOUTS, torch.device("cpu"))
    assert [(tuple(t.shape), t.dtype) for t in tensors] == LAYOUTS
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        assert torch.all(tensor == number)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1


def test_one_that_is_kept_keeps_its_memory():
    kept = empty_together(LAYOUTS, torch.device("cpu"))[1]
    kept.fill_(3)
    assert kept.sum() == 21
