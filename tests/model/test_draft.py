"""Draft experts, merged or record by record, compute what the weights that the draft stands for compute."""

from __future__ import annotations

import pytest
import torch

from engine import Mode
from engine.kernels import int4
from engine.model import draft as drafts
from engine.model.draft import Draft, MergedExperts, RecordExperts, load_draft
from engine.store.draft import draft_bytes, find_draft
from engine.store.layout import StoreInfo, read_info
from engine.store.verify import read_records
from tests.specter import drafted_copy, memory
from tests.streaming import error_of, open_engine, reference, streamed

CPU = torch.device("cpu")
BOUND = 0.02  # activations are rounded to bf16 before each product
KINDS = ["mixtral", "qwen2_moe", "gpt_oss"]
KERNELS = {"merged": MergedExperts, "by record": RecordExperts}


@pytest.fixture(scope="module")
def drafted(store, tmp_path_factory):
    """drafted(kind) -> a store with drafts of all bits, made once."""
    made = {}

    def make(kind: str):
        if kind not in made:
            made[kind] = drafted_copy(store(kind), tmp_path_factory.mktemp("drafted") / kind, 4, 3, 2)
        return made[kind]

    return make


def use_draft(model: torch.nn.Module, directory, bits: int) -> torch.nn.Module:
    """Give a plain transformers model the experts that a draft stands for."""
    info = read_info(directory)
    file = find_draft(directory, info, bits)
    for key, record in enumerate(read_records(file.path, file.layout.record_bytes)):
        views = file.layout.views(torch.frombuffer(bytearray(record), dtype=torch.uint8))
        module, expert = model.get_submodule(info.layers[key // info.experts]), key % info.experts
        for name, form in file.layout.formats.items():
            weight = form.decode({suffix: views[name + suffix] for suffix in form.tensors()})
            getattr(module, f"{name}_proj").data[expert] = weight.t() if module.is_transposed else weight
    return model  # the biases are the target's


def load(directory, bits: int, kernel: str, original: torch.nn.Module, monkeypatch, finish=None) -> tuple[Draft, StoreInfo]:
    if kernel == "by record":
        monkeypatch.setattr(drafts, "_CALL_BYTES", 0)
    info = read_info(directory)
    draft = load_draft(find_draft(directory, info, bits), info, original._apply_gate, finish, CPU)
    assert all(isinstance(layer, KERNELS[kernel]) for layer in draft.layers)
    return draft, info


def routing(tokens: int, info: StoreInfo, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(info.experts, generator=generator)[: info.top_k] for _ in range(tokens)])
    return torch.randn(tokens, 64, generator=generator), ids, torch.rand(tokens, info.top_k, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_they_compute_what_their_weights_give(kind, bits, kernel, drafted, checkpoint, monkeypatch):
    model = use_draft(reference(checkpoint(kind)), drafted(kind), bits)
    originals = [model.get_submodule(path) for path in read_info(drafted(kind)).layers]
    draft, info = load(drafted(kind), bits, kernel, originals[0], monkeypatch)
    for layer, original in zip(draft.layers, originals, strict=True):
        for tokens in (1, 3):
            x, ids, weights = routing(tokens, info, seed=tokens)
            wanted = original(x, ids, weights)
            got = layer(x, ids, weights)
            assert got.dtype == x.dtype and error_of(got, wanted) < BOUND
            half = layer(x.bfloat16(), ids, weights)
            assert half.dtype == torch.bfloat16 and error_of(half.float(), wanted) < BOUND
            ids[:, 1] = info.experts  # transformers' sentinel: no expert
            wanted = original(x, ids.clamp_max(info.experts - 1), weights.index_fill(1, torch.tensor([1]), 0))
            assert error_of(layer(x, ids, weights), wanted) < BOUND
    draft.close()


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_token_without_any_expert_gets_nothing(kernel, drafted, checkpoint, monkeypatch):
    original = reference(checkpoint("qwen2_moe")).get_submodule(read_info(drafted("qwen2_moe")).layers[0])
    draft, info = load(drafted("qwen2_moe"), 4, kernel, original, monkeypatch)
    x, ids, weights = routing(1, info)
    assert torch.equal(draft.layers[0](x, torch.full_like(ids, info.experts), weights), torch.zeros_like(x))


@torch.no_grad()
def test_a_norm_after_each_expert_comes_before_the_weights(drafted, checkpoint, monkeypatch):
    """Such experts cannot be merged, however small they are."""
    directory = drafted("qwen2_moe")
    original = use_draft(reference(checkpoint("qwen2_moe")), directory, 4).get_submodule(read_info(directory).layers[1])

    def finish(out: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(out, out.shape[-1:])

    info = read_info(directory)
    draft = load_draft(find_draft(directory, info, 4), info, original._apply_gate, finish, CPU)
    assert isinstance(draft.layers[1], RecordExperts)
    x, ids, weights = routing(2, info)
    wanted = sum(finish(original(x, ids[:, [j]], torch.ones(2, 1))) * weights[:, [j]] for j in range(info.top_k))
    assert error_of(draft.layers[1](x, ids, weights), wanted) < BOUND


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_drafts_in_any_packing_load_to_the_same_numbers(kernel, bits, store, checkpoint, tmp_path, monkeypatch):
    original, results = reference(checkpoint("qwen2_moe")).get_submodule(read_info(store("qwen2_moe")).layers[0]), []
    for packing in ("plain", "avx2", "avx512"):
        with monkeypatch.context() as patch:
            patch.setattr(int4, "native_packing", lambda packing=packing: packing)
            directory = drafted_copy(store("qwen2_moe"), tmp_path / packing, bits)
        draft, info = load(directory, bits, kernel, original, monkeypatch)
        results.append([layer(*routing(2, info)) for layer in draft.layers])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bytes_are_what_was_announced(kernel, drafted, checkpoint, monkeypatch):
    original = reference(checkpoint("gpt_oss")).get_submodule(read_info(drafted("gpt_oss")).layers[0])
    for bits in (4, 3, 2):
        draft, info = load(drafted("gpt_oss"), bits, kernel, original, monkeypatch)
        assert 0.9 * draft_bytes(info, bits) < draft.bytes <= draft_bytes(info, bits)
        draft.close()
        assert draft.layers == []


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v3", "qwen3_5_moe"])
def test_a_drafting_model_is_the_target_with_the_drafts_experts(kind, drafted, checkpoint):
    wanted = use_draft(reference(checkpoint(kind)), drafted(kind), 4)(input_ids=torch.tensor([[77]])).logits
    exact = reference(checkpoint(kind))(input_ids=torch.tensor([[77]])).logits
    with open_engine(drafted(kind)) as engine:
        engine.configure(mode=Mode.SPECTER, expert_memory=memory(drafted(kind), None))
        model = streamed(engine)
        assert error_of(model(input_ids=torch.tensor([[77]])).logits, exact) < 1e-4
        engine.forecast.begin()
        got = model(input_ids=torch.tensor([[77]])).logits
        engine.forecast.end()
        assert error_of(got, wanted) < BOUND < error_of(got, exact)
        assert error_of(model(input_ids=torch.tensor([[77]])).logits, exact) < 1e-4
