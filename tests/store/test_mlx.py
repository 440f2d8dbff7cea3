"""What MLX quantised is kept to the bit: the store gives the logits of transformers' model with the weights it stands for."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from engine import CancelledError, ConfigError, SourceError, StoreError, UnsupportedModelError, prepare
from engine.kernels import int4
from engine.model.skeleton import cache_argument
from engine.store.layout import read_info
from engine.store.mlx import MlxCheckpoint
from engine.store.source import INDEX_FILE
from tests.store.mlx_checkpoint import dequantise, quantise, write_mlx
from tests.streaming import PROMPT, error_of, greedy, open_engine, reference_greedy, stored_experts, streamed

KINDS = ["qwen3_5_moe", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "bailing_hybrid"]
EXACT = 1e-5  # of the logits' norm: fp32 sums in another order; 0 is measured
PACKED = 0.05  # of the logits' norm: the packed kernel rounds activations to bf16; 0.006 to 0.027 are measured
ADAPTERS = ("prerouter_edge0_tiny.safetensors", "lora_edge0_tiny.safetensors")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """published(kind, ...) -> the directory of a tiny MLX checkpoint, and transformers' model of what it stands for."""
    made = {}

    def make(kind: str, **changes) -> tuple[Path, torch.nn.Module]:
        key = (kind, *sorted(changes.items()))
        if key not in made:
            made[key] = write_mlx(kind, tmp_path_factory.mktemp("mlx") / kind, **changes)
        return made[key]

    return make


@pytest.fixture
def own(published, tmp_path) -> Path:
    """A published checkpoint that the test may change."""
    return shutil.copytree(published("qwen3_5_moe")[0], tmp_path / "own")


@pytest.fixture
def plain(monkeypatch) -> None:
    """Packings as on a processor without a packed kernel, which computes in fp32 where the model does."""
    monkeypatch.setattr("engine.kernels.int4.native_packing", lambda: "plain")


@torch.no_grad()
def logits(model) -> torch.Tensor:
    """Of a prompt, then of five tokens one by one on its cache."""
    ids, cache = torch.tensor([PROMPT]), DynamicCache(config=model.config)
    past = {cache_argument(model): cache}
    pieces = (ids[:, :-5], *ids[:, -5:].split(1, dim=1))
    return torch.cat([model(input_ids=piece, use_cache=True, **past).logits.flatten() for piece in pieces])


def edit(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "mlx"})


def edit_config(directory: Path, change) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_the_dequantised_model(kind, published, tmp_path, plain):
    directory, model = published(kind)
    wanted = logits(model)
    with open_engine(prepare(directory, tmp_path / "store"), read_info(tmp_path / "store").top_k) as engine:
        assert (engine.info.expert_format, engine.info.resident_format) == ("int4", "int4")
        assert error_of(logits(streamed(engine)), wanted) <= EXACT
        assert engine.stats().dropped == 0
        assert greedy(engine) == reference_greedy(model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bailing_hybrid"])  # there close routings flip
def test_the_packed_kernel_stays_close(kind, published, tmp_path):
    directory, model = published(kind)
    with open_engine(prepare(directory, tmp_path / "store")) as engine:
        assert engine.info.resident_packing == engine.info.packing == int4.native_packing()
        assert error_of(logits(streamed(engine)), logits(model)) < PACKED


def test_tied_embeddings_share_the_codes(published, tmp_path, plain):
    directory, model = published("qwen3_moe", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    with open_engine(prepare(directory, tmp_path / "store")) as engine:
        got = streamed(engine)
        assert got.lm_head.q.data_ptr() == got.model.embed_tokens.q.data_ptr()
        assert error_of(logits(got), logits(model)) <= EXACT


@pytest.mark.parametrize("packing", ["plain", "avx2", "avx512"])
def test_the_experts_codes_are_the_checkpoints(packing, published, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.kernels.int4.native_packing", lambda: packing)
    directory, model = published("qwen3_5_moe")
    for path, expert, tensors in stored_experts(prepare(directory, tmp_path / "store")):
        module = model.get_submodule(path)
        for name, matrix in tensors.items():
            assert torch.allclose(matrix, getattr(module, f"{name}_proj")[expert], rtol=1e-5, atol=1e-7)


def test_zeros_are_exact_where_weights_have_both_signs_and_within_bf16_elsewhere():
    torch.manual_seed(0)
    for weight, bound in (
        (torch.randn(64, 512), 1e-7),
        (torch.rand(64, 512) + 4, 2**-8),
        (-torch.rand(64, 512), 2**-8),
    ):
        parts = quantise(weight, 4)
        reader = MlxCheckpoint.__new__(MlxCheckpoint)
        reader._triple = lambda part, row, p=parts: (p["weight"].view(torch.uint8), p["scales"], p["biases"])
        codes = reader._codes((None,), None)
        off = (int4.dequantise(codes[".q"], codes[".sz"], "plain") - dequantise(parts, 4)).abs()
        assert off.max() <= bound * weight.abs().max()


@pytest.mark.parametrize(("experts", "bound"), [("bf16", 0.003), ("int8", 0.01)])
def test_other_formats_are_made_of_the_dequantised_weights(experts, bound, published, tmp_path, plain):
    directory, model = published("qwen3_5_moe")
    path = prepare(directory, tmp_path / "store", experts, resident="native")
    for layer, expert, tensors in stored_experts(path):
        for name, matrix in tensors.items():
            assert error_of(matrix, getattr(model.get_submodule(layer), f"{name}_proj").data[expert]) < bound
    with open_engine(path) as engine:
        assert engine.info.resident_format == "native"
        state = streamed(engine).state_dict()
        for name, tensor in model.state_dict().items():
            assert name not in state or (state[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max()


def test_eight_bits_throughout(published, tmp_path):
    directory, model = published("qwen3_moe", bits=8)
    with open_engine(prepare(directory, tmp_path / "store")) as engine:
        assert (engine.info.expert_format, engine.info.resident_format) == ("int8", "native")
        assert error_of(logits(streamed(engine)), logits(model)) < PACKED


def test_in_bf16_as_published(published, tmp_path):
    directory, model = published("qwen3_5_moe", dtype=torch.bfloat16)
    with open_engine(prepare(directory, tmp_path / "store")) as engine:
        got = streamed(engine)
        assert got.dtype == torch.bfloat16
        assert got.model.embed_tokens(torch.tensor([[5]])).dtype == torch.bfloat16
        assert error_of(logits(got).float(), logits(model)) < 2 * PACKED


def test_shards_with_borders_inside_a_weight(own, published, tmp_path):
    tensors, index = load_file(own / "model.safetensors"), {}
    for start in range(0, len(tensors), 7):
        shard, names = f"model-{start:05}.safetensors", sorted(tensors)[start : start + 7]
        index.update(dict.fromkeys(names, shard))
        save_file({name: tensors[name] for name in names}, own / shard)
    (own / "model.safetensors").unlink()
    (own / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    made, wanted = prepare(own, tmp_path / "store"), prepare(published("qwen3_5_moe")[0], tmp_path / "whole")
    for name in ("experts.bin", "resident.safetensors"):
        assert (made / name).read_bytes() == (wanted / name).read_bytes()


def test_cancelled_and_resumed_it_is_the_same_to_the_byte(published, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.store.writer._SYNC_EVERY", 4)
    directory, _ = published("qwen3_5_moe")
    cancel = threading.Event()

    def halfway(progress):
        if progress.done > progress.total // 2:
            cancel.set()

    with pytest.raises(CancelledError):
        prepare(directory, tmp_path / "store", progress=halfway, cancel=cancel)
    seen = []
    made, wanted = prepare(directory, tmp_path / "store", progress=seen.append), prepare(directory, tmp_path / "whole")
    assert seen[0].done > 0
    for path in wanted.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes()


# -- the experts a token ---------------------------------------------------------------------------------------------


def test_the_heads_say_how_many_experts_a_token_gets(published, tmp_path):
    directory, _ = published("qwen3_5_moe")
    assert json.loads((directory / "config.json").read_text())["text_config"]["num_experts_per_tok"] == 3
    store = prepare(directory, tmp_path / "store")
    config = json.loads((store / "config.json").read_text())
    assert config["text_config"]["num_experts_per_tok"] == read_info(store).top_k == 2
    assert not {"quantization", "quantization_config"} & config.keys()
    for name in ADAPTERS:
        assert (store / name).read_bytes() == (directory / name).read_bytes()
    with pytest.raises(StoreError, match=r"holds another store \(.*, 2 experts a token\)"):
        prepare(directory, store, top_k=3)


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "mixtral", "bailing_hybrid"])
def test_another_number_can_be_asked_for(kind, published, tmp_path):
    directory, _ = published(kind)
    with open_engine(prepare(directory, tmp_path / "store", top_k=1)) as engine:
        asked = []
        layer = streamed(engine).get_submodule(engine.info.layers[0])
        layer.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[1].shape[-1]))
        greedy(engine, tokens=2)
        assert set(asked) == {1}


def test_a_plain_checkpoint_can_be_asked_for_another_number(checkpoint, tmp_path):
    assert read_info(prepare(checkpoint("qwen2_moe"), tmp_path / "store", "bf16", top_k=2)).top_k == 2


@pytest.mark.parametrize("k", [0, 9])
def test_more_experts_than_there_are(k, published, tmp_path):
    with pytest.raises(ConfigError, match=f"top k {k} is not possible: .* has 8 experts"):
        prepare(published("qwen3_5_moe")[0], tmp_path / "store", top_k=k)


def test_heads_that_disagree(own, tmp_path):
    heads = {"layers.1.fc1.weight": torch.zeros(1)}
    save_file(heads, own / "prerouter_other.safetensors", metadata={"K": "3"})
    with pytest.raises(SourceError, match="the prerouter heads .* are for 2 and 3 experts a token: keep the ones"):
        prepare(own, tmp_path / "store")
    (own / "prerouter_other.safetensors").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"prerouter_other\.safetensors is damaged"):
        prepare(own, tmp_path / "store")


# -- what cannot be read ---------------------------------------------------------------------------------------------

LAYER = "language_model.model.layers.0"


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
@pytest.mark.parametrize("path", [f"{LAYER}.mlp.switch_mlp.up_proj", f"{LAYER}.linear_attn.out_proj"])
def test_a_part_of_a_weight_is_missing(path, part, own, tmp_path):
    edit(own, lambda tensors: tensors.pop(f"{path}.{part}"))
    with pytest.raises(SourceError, match=rf"{path} is quantised, but {path}\.{part} is missing"):
        prepare(own, tmp_path / "store")


def test_codes_without_any_scale(own, tmp_path):
    path = f"{LAYER}.linear_attn.out_proj"
    edit(own, lambda tensors: [tensors.pop(f"{path}.{part}") for part in ("scales", "biases")])
    with pytest.raises(SourceError, match=rf"{path}\.weight is quantised, but {path}\.scales is missing"):
        prepare(own, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_expert_matrix_is_missing(own, tmp_path):
    edit(
        own,
        lambda tensors: [tensors.pop(f"{LAYER}.mlp.switch_mlp.gate_proj.{p}") for p in ("weight", "scales", "biases")],
    )
    with pytest.raises(SourceError, match=r"the checkpoint lacks 1 tensors of the model, .*experts\.gate_up_proj"):
        prepare(own, tmp_path / "store")
    edit(
        own,
        lambda tensors: [tensors.pop(f"{LAYER}.mlp.switch_mlp.up_proj.{p}") for p in ("weight", "scales", "biases")],
    )
    with pytest.raises(SourceError, match=r"lacks up_proj of the experts of model\.layers\.0\.mlp"):
        prepare(own, tmp_path / "store")


@pytest.mark.parametrize("change", [dict(bits=3), dict(group_size=32), dict(mode="mxfp4")], ids=str)
def test_a_quantisation_of_another_kind(change, own, tmp_path):
    edit_config(own, lambda config: config["quantization"].update(change))
    with pytest.raises(SourceError, match="the checkpoint is quantised to .* only affine 4 and 8 bits in groups of 64"):
        prepare(own, tmp_path / "store")


def test_a_weight_listed_with_other_bits(own, tmp_path):
    path = f"{LAYER}.linear_attn.out_proj"
    edit_config(own, lambda config: config["quantization"].update({path: {"group_size": 64, "bits": 6}}))
    with pytest.raises(SourceError, match=rf"{path} is quantised to 6 bits"):
        prepare(own, tmp_path / "store")
    edit_config(own, lambda config: config["quantization"].update({path: {"group_size": 64, "bits": 8}}))
    with pytest.raises(
        SourceError, match=rf"{path}\.weight .* is not 8 bits in groups of 64, as its config\.json says"
    ):
        prepare(own, tmp_path / "store")


def test_biases_of_another_shape(own, tmp_path):
    name = f"{LAYER}.mlp.switch_mlp.up_proj.biases"
    edit(own, lambda tensors: tensors.update({name: tensors[name][..., :1].contiguous()}))
    with pytest.raises(SourceError, match=rf"{name} is .* which does not go with its weight"):
        prepare(own, tmp_path / "store")


def test_a_tensor_that_nobody_knows(published, tmp_path):
    own = shutil.copytree(published("bailing_hybrid")[0], tmp_path / "own")
    edit(own, lambda tensors: tensors.update({"model.layers.1.attention.h_proj.weight": torch.zeros(4, 4)}))
    with pytest.raises(
        SourceError, match=r"has 1 tensors that .* does not know, .*model\.layers\.1\.attention\.h_proj"
    ):
        prepare(own, tmp_path / "store")


def test_a_truncated_shard(own, tmp_path):
    path = own / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"model\.safetensors is truncated"):
        prepare(own, tmp_path / "store")


def test_experts_laid_out_otherwise(checkpoint, tmp_path):
    own = shutil.copytree(checkpoint("gpt_oss"), tmp_path / "own")
    edit_config(own, lambda config: config.update(quantization={"group_size": 64, "bits": 4}))
    with pytest.raises(UnsupportedModelError, match="'gpt_oss' lays its experts out in a way that is not known of MLX"):
        prepare(own, tmp_path / "store")
