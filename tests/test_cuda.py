"""On a CUDA device the engine says what it says on the processor, near-ties aside, from few slots and in every mode."""

from __future__ import annotations

import pytest
import torch

from engine import Mode
from engine.kernels import int4
from engine.store.draft import draft_bytes
from engine.store.layout import read_info
from tests.specter import divergence, drafted_copy
from tests.streaming import PROMPT, greedy, open_engine

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that torch can use"),
]
KINDS = ["qwen3_moe", "gpt_oss", "deepseek_v2", "qwen3_5_moe"]
PROMPTS = [PROMPT, PROMPT[::-1], [5, 60, 200, 7]]


def partings(directory, engine) -> list[str]:
    """Where the replies of `engine` part from plain decoding on the processor, other than at near-ties."""
    with open_engine(directory, None, device="cpu") as plain:
        found = [divergence(plain, prompt, greedy(engine, prompt), greedy(plain, prompt)) for prompt in PROMPTS]
    return [parting for parting in found if parting]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("misses", ["copy", "cpu", "auto"])
def test_tokens_are_the_processors(kind, misses, store):
    directory = store(kind)
    with open_engine(directory, 4, "gate", device="cuda", misses=misses) as engine:
        assert not partings(directory, engine)
        stats = engine.stats()
        assert (stats.link, stats.dropped) == ("pcie", 0)
        assert stats.pinned in (True, False)
        assert (stats.computed_on_host > 0) or misses != "cpu"
        assert (stats.computed_on_host == 0) or misses != "copy"


@pytest.mark.parametrize("host_memory", ["100%", 1])  # one byte: the fewest host slots that can serve a layer
def test_host_memory_may_be_smaller_than_the_experts(host_memory, store):
    directory = store("qwen3_moe")
    with open_engine(directory, 4, device="cuda", host_memory=host_memory) as engine:
        assert not partings(directory, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_specter_tokens_are_the_processors(kind, store, tmp_path):
    directory = drafted_copy(store(kind), tmp_path / "store", 4)
    info = read_info(directory)
    memory = draft_bytes(info, 4) + (info.top_k + 2) * info.layout.record_bytes
    with open_engine(directory, None, device="cuda") as engine:
        engine.configure(mode=Mode.SPECTER, depth=4, expert_memory=memory)
        assert not partings(directory, engine)
        assert engine.stats().acceptance_by_position


def test_packed_products_are_those_of_dequantised_weights():
    device = torch.device("cuda")
    packing = int4.loading_packing(device)
    if packing == "plain":
        pytest.skip("this device has no packed product")
    q = torch.randint(0, 16, (64, 256), dtype=torch.uint8, device=device)
    scales = torch.randn(4, 64, 2, device=device).mul(0.1).to(torch.bfloat16)
    packed = int4.pack(q, packing)
    assert (packed.dtype, packed.shape) == (torch.uint8, (64, 128))
    for rows in (1, 3, 17):
        x = torch.randn(rows, 256, device=device).to(torch.bfloat16)
        wanted = int4.matmul(x, int4.pack(q, "plain"), scales, "plain").float()
        assert (int4.matmul(x, packed, scales, packing).float() - wanted).norm() < 0.02 * wanted.norm()
