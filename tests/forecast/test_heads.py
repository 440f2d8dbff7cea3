"""A head computes its definition, from memory of its own."""

from __future__ import annotations

import pytest
import torch

from engine.forecast.heads import make_heads, read_heads
from engine.forecast.prerouter import load_prerouter
from engine.store.layout import read_info
from engine.train.edge0.path import TrainedHead
from tests.edge0 import put_heads


def parts(hidden: int, experts: int, inner: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator, wide = torch.Generator().manual_seed(3), hidden + 2 * experts
    shapes = {"fc1": (inner, wide), "fc2": (experts, inner), "linear_init": (experts, wide)}
    return {name: (torch.randn(shape, generator=generator) * 0.3).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
@pytest.mark.parametrize("previous", [None, [4, 1]])
def test_adding_rows_up_is_multiplying_by_sums_of_one_hots(previous, dtype, error):
    tensors, m, current = parts(16, 6, 9, dtype), torch.randn(1, 16), [5, 2]
    features = torch.cat([m[0].to(dtype).float(), torch.zeros(12)])
    for expert in [16 + e for e in current] + [22 + e for e in previous or []]:
        features[expert] += 1
    head = make_heads({3: tensors}, torch.device("cpu"))[3]
    logits = head.logits(m, torch.tensor(current), None if previous is None else torch.tensor(previous))
    torch.testing.assert_close(logits.float(), TrainedHead(**tensors)(features)[None], rtol=error, atol=error)
    assert logits.shape == (1, 6)
    assert head.bytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_what_is_held_is_no_view_of_the_file(own_store):
    store = own_store()
    put_heads(store)
    prerouter = load_prerouter(store, read_info(store), torch.device("cpu"))
    held = [t for head in prerouter.heads.values() for t in (head.dense, head.sparse, head.out)]
    assert len({t.untyped_storage().data_ptr() for t in held}) == 1  # dropped as a whole
    file = read_heads(prerouter.file)
    assert prerouter.bytes == sum(t.numel() * 2 for head in file.tensors.values() for t in head.values())
