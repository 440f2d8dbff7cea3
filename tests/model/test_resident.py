"""Weights held in int4 compute what their codes stand for, wherever they were quantised, and are never held twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine import ConfigError, StoreError, prepare
from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.model.resident import Int4Embedding, Int4Linear, Int4Matrix, quantisable, tied_modules
from engine.model.skeleton import build_skeleton
from engine.store.layout import read_info
from tests.streaming import PROMPT, error_of, greedy, open_engine, streamed
from tests.tiny_models import CONFIGS, save_random, tiny_config

PROJECT = Path(__file__).resolve().parents[2]
EXACT, PACKED = 1e-5, 0.05  # of the logits' norm: in fp32, and with activations rounded to bf16
WIDE = dict(hidden_size=256, num_attention_heads=4, head_dim=64)  # wide enough that attention and embedding are large


def wide_config(kind: str, **changes):
    config = tiny_config(kind)
    for name, value in {**WIDE, **changes}.items():
        if name != "head_dim" or "head_dim" in CONFIGS[kind] and kind != "bailing_hybrid":
            setattr(config, name, value)
    return type(config).from_dict(config.to_dict())


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """wide(kind, ...) -> the directory of a small fp32 checkpoint with linears worth quantising."""
    made = {}

    def make(kind: str, **changes) -> Path:
        key = (kind, *changes.items())
        if key not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(wide_config(kind, **changes), dtype=torch.float32)
            made[key] = save_random(model, tmp_path_factory.mktemp("wide") / kind, torch.float32)
        return made[key]

    return make


@pytest.fixture
def plain(monkeypatch) -> None:
    monkeypatch.setattr("engine.kernels.int4.native_packing", lambda: "plain")


def codes(model: torch.nn.Module) -> dict[str, Int4Matrix]:
    return {path: module for path, module in model.named_modules() if isinstance(module, Int4Matrix)}


@torch.no_grad()
def dequantised(checkpoint: Path, model: torch.nn.Module) -> torch.nn.Module:
    """The checkpoint in plain transformers, with the weights that `model` holds as codes rounded to those."""
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for path, module in codes(model).items():
        weight = int4.dequantise(module.q, module.sz, module.form.packing)
        plain.get_submodule(path).weight.copy_(weight)
    return plain


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_int4_store_computes_what_its_codes_stand_for(kind, wide, tmp_path, plain):
    store = prepare(wide(kind), tmp_path / "store", "bf16", resident="int4")
    with open_engine(store) as engine:
        got = streamed(engine)
        held = codes(got)
        assert isinstance(got.get_input_embeddings(), Int4Embedding)
        assert any(isinstance(module, Int4Linear) for module in held.values())
        assert error_of(logits(got), logits(dequantised(wide(kind), got))) <= EXACT
        assert not any(path.endswith(("gate", "router")) for path in held)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("written", ["plain", "avx2", "avx512"])
def test_wherever_it_was_packed_it_is_the_same(written, tied, wide, tmp_path, monkeypatch):
    checkpoint = wide("qwen3_moe", tie_word_embeddings=tied)
    monkeypatch.setattr("engine.kernels.int4.native_packing", lambda: written)
    store = prepare(checkpoint, tmp_path / "store", "bf16", resident="int4")
    assert read_info(store).resident_packing == written
    monkeypatch.undo()
    with open_engine(store) as engine:
        got = streamed(engine)
        assert got.lm_head.form.packing == int4.native_packing()
        assert (got.lm_head.q.data_ptr() == got.model.embed_tokens.q.data_ptr()) is tied
        assert error_of(logits(got), logits(dequantised(checkpoint, got))) < PACKED
        assert error_of(logits(got), logits(AutoModelForCausalLM.from_pretrained(checkpoint).eval())) < 0.4
        tokens = greedy(engine)
    with open_engine(prepare(checkpoint, tmp_path / "native", "bf16"), resident="int4") as engine:
        assert codes(streamed(engine)).keys() == codes(got).keys()
        assert greedy(engine) == tokens  # quantised while loading, the very same codes
    with open_engine(store, resident="int4") as engine:
        assert greedy(engine) == tokens  # int4 already


def test_what_is_held_is_what_the_file_holds(wide, tmp_path):
    checkpoint = wide("qwen3_moe", tie_word_embeddings=True)
    native = read_info(prepare(checkpoint, tmp_path / "native", "bf16"))
    with open_engine(prepare(checkpoint, tmp_path / "store", "bf16", resident="int4")) as engine:
        held = engine.stats().active_bytes_by_kind["resident"]
        assert held <= engine.info.resident_bytes < 0.5 * native.resident_bytes
        assert held > 0.9 * (engine.info.resident_bytes - 2**14)  # the file's header aside
        assert engine.plan.resident_bytes == engine.info.resident_bytes
        assert engine.info.quantised_share > 0.3 > native.quantised_share == 0


def test_the_format_is_part_of_what_a_store_is(wide, tmp_path):
    checkpoint = wide("qwen3_moe")
    store = prepare(checkpoint, tmp_path / "store", "bf16", resident="int4")
    assert prepare(checkpoint, store, "bf16", resident="int4") == store
    with pytest.raises(StoreError, match=r"holds another store \(qwen3_moe, bf16, resident weights int4\)"):
        prepare(checkpoint, store, "bf16")
    with pytest.raises(ConfigError, match="resident format 'int8' is unknown: choose from native, int4"):
        prepare(checkpoint, store, "bf16", resident="int8")


def test_a_store_of_the_first_version_still_loads(own_store):
    from engine.store.layout import _checksum

    directory = own_store()
    document = json.loads((directory / "store.json").read_text())
    for name in ("resident_format", "resident_packing"):
        del document["store"][name]
    document["store"]["version"] = 1
    document["checksum"] = _checksum(document["store"])
    (directory / "store.json").write_text(json.dumps(document))
    assert read_info(directory).resident_format == "native"
    with open_engine(directory, 3) as engine:
        greedy(engine)


def test_codes_that_are_not_the_models(wide, tmp_path):
    store = prepare(wide("qwen3_moe"), tmp_path / "store", "bf16", resident="int4")
    path = store / "resident.safetensors"
    path.write_bytes(path.read_bytes().replace(b"lm_head.sz", b"lm_head.zs", 1))
    with pytest.raises(StoreError, match=r"resident\.safetensors does not match the model .*lm_head"):
        open_engine(store)


@pytest.mark.parametrize("packing", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("rows", [320, 352, 304, 80])  # whole blocks, and short last ones
def test_an_embedding_unpacks_the_rows_it_is_asked_for(rows, packing, monkeypatch):
    embedding = torch.nn.Embedding(rows, 64, dtype=torch.bfloat16)
    form = MatrixFormat.choose("int4", (rows, 64), packing)
    encoded = form.encode(embedding.weight.data)
    module = Int4Embedding(form, encoded[".q"], encoded[".sz"], embedding)
    whole = form.decode(encoded)
    monkeypatch.setattr("engine.kernels.int4.unpack", None if packing != "plain" else int4.unpack)  # the whole matrix
    for ids in (torch.tensor([[0]]), torch.randint(0, rows, (3, 7)), torch.arange(rows)[None]):
        got = module(ids)
        assert (got.dtype, got.shape) == (torch.bfloat16, (*ids.shape, 64))
        assert torch.equal(got, whole[ids].bfloat16())


def test_a_large_matrix_is_worked_on_in_blocks_to_the_same_result(monkeypatch):
    torch.manual_seed(0)
    weight, x = torch.randn(320, 128), torch.randn(3, 128)
    q, sz = int4.quantise(weight, 64)
    wanted = int4.matmul(x, int4.pack(q, "avx2"), sz, "plain")
    packed = int4.pack(q, "avx512")
    monkeypatch.setattr(int4, "_AT_ONCE", 64 * 128)
    assert len(int4.row_blocks(320, 128)) == 5
    assert torch.equal(int4.matmul(x, int4.pack(q, "avx2"), sz, "plain"), wanted)
    assert torch.equal(int4.repack(int4.pack(q, "avx2"), "avx2", "avx512"), packed)
    in_blocks = int4.quantise(weight, 64)
    assert (int4.dequantise(int4.pack(in_blocks[0], "plain"), in_blocks[1], "plain") - weight).abs().mean() < 0.15


def test_routers_heads_and_odd_shapes_are_left_alone():
    config = wide_config("qwen3_moe", vocab_size=321, tie_word_embeddings=True)
    model = build_skeleton(config)
    assert tied_modules(model) == {"lm_head": "model.embed_tokens"}
    assert not {"lm_head", "model.embed_tokens"} & quantisable(model).keys()  # 321 rows suit no packed kernel
    config = wide_config("qwen3_moe", vocab_size=321)
    assert "model.embed_tokens" in quantisable(build_skeleton(config))  # looking rows up needs none
    assert "lm_head" not in quantisable(build_skeleton(config))


# -- memory while loading --------------------------------------------------------------------------------------------

# Loads the store twice over and says by how much the process's peak grew the second time, and what it then holds.
LOADER = """
import gc, sys
from pathlib import Path
import torch
from engine.model.loader import load_model
from engine.store.layout import read_info
def high():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
small, large = map(Path, sys.argv[1:])
load_model(small, read_info(small), torch.device("cpu"))  # what loading imports is there before anything is measured
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = high()
model, _ = load_model(large, read_info(large), torch.device("cpu"))
print(high() - before)
"""


def _large_checkpoint(directory: Path) -> Path:
    """An MLX checkpoint with a large vocabulary and random codes: no solver has to make them."""
    config = tiny_config("qwen3_moe")
    config.hidden_size, config.vocab_size, config.moe_intermediate_size, config.num_hidden_layers = 512, 131072, 64, 1
    config = type(config).from_dict(config.to_dict())
    tensors = {}
    for name, tensor in build_skeleton(config, torch.bfloat16).state_dict().items():
        if tensor.ndim == 1:
            tensors[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
            continue
        name = name.replace(".experts.", ".switch_mlp.")
        halves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else (name.split(".")[-1],)
        for half in halves:
            path = name.removesuffix(".weight") if len(halves) == 1 else name.replace("gate_up_proj", half)
            rows, columns = tensor.shape[-2] // len(halves), tensor.shape[-1]
            lead = tensor.shape[:-2]
            tensors[f"{path}.weight"] = torch.randint(0, 2**31, (*lead, rows, columns // 8)).to(torch.uint32)
            tensors[f"{path}.scales"] = torch.full((*lead, rows, columns // 64), 0.01, dtype=torch.bfloat16)
            tensors[f"{path}.biases"] = torch.full((*lead, rows, columns // 64), -0.08, dtype=torch.bfloat16)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    quantised = {**config.to_dict(), "quantization": {"group_size": 64, "bits": 4}}
    (directory / "config.json").write_text(json.dumps(quantised, default=str))
    return directory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts what Linux says of the process")
@pytest.mark.parametrize("packing", ["plain", None], ids=["repacked", "as written"])
def test_loading_holds_the_final_bytes_and_little_else(packing, store, tmp_path, monkeypatch):
    if packing:
        monkeypatch.setattr("engine.kernels.int4.native_packing", lambda: packing)
    large = prepare(_large_checkpoint(tmp_path / "checkpoint"), tmp_path / "store")
    monkeypatch.undo()
    held = read_info(large).resident_bytes
    assert held > 70 * 2**20
    command = [sys.executable, "-c", LOADER, str(store("qwen3_moe")), str(large)]
    grown = int(subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=300).stdout)
    # Repacking unpacks 16 million weights at a time, a byte each, and packs them: that does not grow with the model.
    assert grown < 1.1 * held + (64 * 2**20 if packing else 8 * 2**20)
