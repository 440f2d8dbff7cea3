"""Preparing takes any layout of shards, resumes after a kill to the very same bytes, and loses nothing that existed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine import CancelledError, ConfigError, SourceError, StoreError, UnsupportedModelError, prepare
from engine.store.layout import read_info
from engine.store.source import INDEX_FILE, LocalSource
from engine.store.verify import verify
from tests.streaming import PROMPT, greedy, open_engine, reference, reference_greedy
from tests.tiny_models import save_random, tiny_config, write_checkpoint

PROJECT = Path(__file__).resolve().parents[2]

# Prepares and says how far it is, so that it can be killed at a known point; every unit is journalled.
WORKER = """
import sys
from pathlib import Path
from engine.store import writer
writer._SYNC_EVERY = 1
writer.prepare(sys.argv[1], Path(sys.argv[2]), "int4", lambda progress: print(progress.done, flush=True))
"""


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def own_checkpoint(checkpoint, tmp_path) -> Path:
    """A checkpoint of one shard that the test may damage."""
    return shutil.copytree(checkpoint("qwen2_moe"), tmp_path / "own-checkpoint")


def edit(directory: Path, change) -> None:
    """Rewrite the tensors of a checkpoint of one shard."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def sharded(checkpoint, tmp_path_factory) -> Path:
    """The qwen2_moe checkpoint in many shards, with borders inside layers and inside experts."""
    directory = tmp_path_factory.mktemp("sharded") / "checkpoint"
    shutil.copytree(checkpoint("qwen2_moe"), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(checkpoint("qwen2_moe") / "model.safetensors")
    names, index = sorted(tensors), {}
    for start in range(0, len(names), 13):
        shard = f"model-{start // 13:05}.safetensors"
        index.update(dict.fromkeys(names[start : start + 13], shard))
        save_file({name: tensors[name] for name in names[start : start + 13]}, directory / shard, {"format": "pt"})
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return directory


def test_shards_make_no_difference(sharded, store, tmp_path):
    made, wanted = content(prepare(sharded, tmp_path / "store", "bf16")), content(store("qwen2_moe"))
    assert made["experts.bin"] == wanted["experts.bin"]
    assert made["resident.safetensors"] == wanted["resident.safetensors"]


def test_each_shard_is_fetched_once_and_let_go_after_its_last_use(sharded, tmp_path, monkeypatch):
    held, fetched, most = set(), [], 0

    class Fetched(LocalSource):
        def open_shard(self, name: str) -> Path:
            nonlocal most
            held.add(name)
            fetched.append(name)
            most = max(most, len(held))
            return super().open_shard(name)

        def release_shard(self, name: str) -> None:
            held.discard(name)

    monkeypatch.setattr("engine.store.writer.open_source", lambda path, progress, cancel: Fetched(path))
    monkeypatch.setattr("engine.store.blueprint.fingerprint", lambda source: "the same")  # it looks into local shards
    prepare(sharded, tmp_path / "store", "bf16")
    assert sorted(fetched) == sorted(path.name for path in sharded.glob("*.safetensors"))
    assert not held
    assert most < len(fetched) / 2


def test_other_safetensors_beside_the_model_are_left_alone(own_checkpoint, store, tmp_path):
    save_file({"model.norm.weight": torch.zeros(64)}, own_checkpoint / "adapter.safetensors")
    made = content(prepare(own_checkpoint, tmp_path / "store", "bf16"))
    assert made["resident.safetensors"] == content(store("qwen2_moe"))["resident.safetensors"]


def test_a_store_holds_what_is_needed_to_chat_and_nothing_else(store):
    directory = store("qwen2_moe", "int4")
    names = set(content(directory))
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert not any(name.endswith((".tmp", ".jsonl", ".partial")) or name.startswith("model") for name in names)
    assert not list(directory.parent.glob("*.partial"))
    verify(directory, lambda progress: None)


def test_what_the_store_says_of_itself(store, checkpoint):
    weights = load_file(checkpoint("qwen2_moe") / "model.safetensors")
    info = read_info(store("qwen2_moe", "int4"))
    experts = sum(t.numel() for name, t in weights.items() if ".experts." in name)
    assert info.quantised_share == pytest.approx(experts / sum(t.numel() for t in weights.values()))
    assert (info.experts, info.top_k, info.hidden, len(info.layers)) == (8, 3, 64, 3)
    assert read_info(store("qwen2_moe")).quantised_share == 0
    assert info.source == checkpoint("qwen2_moe").name


def test_progress_counts_up_to_the_whole(checkpoint, tmp_path):
    seen = []
    prepare(checkpoint("qwen2_moe"), tmp_path / "store", "bf16", seen.append)
    counted = [progress for progress in seen if progress.unit == "tensors"]
    assert [progress.done for progress in counted] == list(range(counted[0].total))
    assert (seen[-1].done, seen[-1].total) == (1, 1)


# -- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_at", [1, 50])
def test_killed_and_resumed_it_is_the_same_to_the_byte(kill_at, checkpoint, store, tmp_path):
    source, destination = checkpoint("qwen2_moe"), tmp_path / "store"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(source), str(destination)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    for line in worker.stdout:
        if int(line) == kill_at:
            worker.kill()
            break
    worker.wait(60)
    assert not destination.exists()
    assert (tmp_path / "store.partial").is_dir()
    seen = []
    prepare(source, destination, "int4", seen.append)
    assert seen[0].done >= kill_at  # what was done is not done again
    assert content(destination) == content(store("qwen2_moe", "int4"))


def test_cancelled_and_resumed_it_is_the_same_to_the_byte(checkpoint, store, tmp_path):
    cancel = threading.Event()

    def cancel_halfway(progress):
        if progress.done == progress.total // 2:
            cancel.set()

    with pytest.raises(CancelledError, match="preparing the same model again resumes"):
        prepare(checkpoint("qwen2_moe"), tmp_path / "store", "bf16", cancel_halfway, cancel)
    assert not (tmp_path / "store").exists()
    prepare(checkpoint("qwen2_moe"), tmp_path / "store", "bf16")
    assert content(tmp_path / "store") == content(store("qwen2_moe"))


@pytest.mark.parametrize("damage", ["journal cut", "journal of noise", "no data", "another format"])
def test_what_was_begun_is_only_used_where_it_can_be(damage, checkpoint, store, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.store.writer._SYNC_EVERY", 4)
    cancel = threading.Event()
    begun = "int8" if damage == "another format" else "bf16"
    with pytest.raises(CancelledError):
        prepare(checkpoint("qwen2_moe"), tmp_path / "store", begun,
                lambda progress: cancel.set() if progress.done > 50 else None, cancel)  # fmt: skip
    work = tmp_path / "store.partial"
    journal = work / "journal.jsonl"
    assert len(journal.read_text().splitlines()) > 40
    if damage == "journal cut":
        journal.write_bytes(journal.read_bytes()[:-5])
    elif damage == "journal of noise":
        journal.write_bytes(journal.read_bytes()[3:])
    elif damage == "no data":
        (work / "experts.bin").unlink()
    prepare(checkpoint("qwen2_moe"), tmp_path / "store", "bf16")
    assert content(tmp_path / "store") == content(store("qwen2_moe"))


# -- full disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(MiB) -> a directory on a file system of its own."""
    mounted = []

    def mount(mib: int) -> Path:
        directory = tmp_path / f"disk-{mib}"
        directory.mkdir()
        if not shutil.which("mount"):
            pytest.skip("needs a small file system, and there is no mount here")
        result = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)], capture_output=True, text=True
        )
        if result.returncode:
            pytest.skip(f"needs a small file system, and cannot mount one: {result.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(small_disk, checkpoint):
    disk = small_disk(16)
    with pytest.raises(StoreError, match=r"not enough disk for .*store\.partial: the store needs .* free some space"):
        prepare(checkpoint("qwen2_moe"), disk / "store", "bf16")
    assert not (disk / "store").exists()


def test_a_disk_that_fills_up_meanwhile_loses_nothing(small_disk, checkpoint, store):
    disk = small_disk(80)
    filler = disk / "filler"

    def fill(progress):
        if progress.done == 40:
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:  # noqa: PT011 - no space left
                while True:
                    file.write(bytes(4096))

    with pytest.raises(StoreError, match="cannot write .*: No space left on device; free some space .* it resumes"):
        prepare(checkpoint("qwen2_moe"), disk / "store", "bf16", fill)
    assert not (disk / "store").exists()
    filler.unlink()
    prepare(checkpoint("qwen2_moe"), disk / "store", "bf16")
    made, wanted = content(disk / "store"), content(store("qwen2_moe"))
    assert made == wanted


# -- what is in the way ----------------------------------------------------------------------------------------------


def test_an_existing_store_of_the_same_model_is_returned(checkpoint, own_store):
    directory = own_store()
    before = content(directory)
    assert prepare(checkpoint("qwen2_moe"), directory, "bf16") == directory
    assert content(directory) == before


def test_an_existing_store_of_another_model_or_format_is_kept(checkpoint, own_store):
    directory = own_store()
    before = content(directory)
    with pytest.raises(
        StoreError, match=r"holds another store \(qwen2_moe, bf16\); choose another destination or remove"
    ):
        prepare(checkpoint("qwen2_moe"), directory, "int8")
    with pytest.raises(StoreError, match="holds another store"):
        prepare(checkpoint("olmoe"), directory, "bf16")
    assert content(directory) == before


def test_a_fine_tuned_model_is_not_taken_for_its_base(own_checkpoint, own_store):
    edit(own_checkpoint, lambda tensors: [t.mul_(1.01) for t in tensors.values()])
    with pytest.raises(StoreError, match="holds another store"):
        prepare(own_checkpoint, own_store(), "bf16")


def test_anything_else_at_the_destination_is_kept(checkpoint, tmp_path):
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary/today.txt").write_text("dear diary")
    for place in ("diary", "diary/today.txt"):
        with pytest.raises(StoreError, match="exists and is not a store; choose another destination or remove it"):
            prepare(checkpoint("qwen2_moe"), tmp_path / place, "bf16")
    assert (tmp_path / "diary/today.txt").read_text() == "dear diary"


def test_a_destination_that_cannot_be_made(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write .*choose another destination"):
        prepare(checkpoint("qwen2_moe"), tmp_path / "file/store", "bf16")


# -- what is wrong with the source -----------------------------------------------------------------------------------


def test_an_unknown_expert_format(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="expert format 'int3' is unknown: choose from bf16, int8, int4"):
        prepare(checkpoint("qwen2_moe"), tmp_path / "store", "int3")


def test_a_dense_model(tmp_path):
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(
        UnsupportedModelError, match="'llama' is not a Mixture-of-Experts model.*choose an MoE checkpoint"
    ):
        prepare(tmp_path / "dense", tmp_path / "store")
    assert not (tmp_path / "store.partial").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "brain"}', "describes no architecture this transformers version knows: .*brain"),
        ("{", "config.json"),
        ('{"model_type": "bert"}', "'bert' "),
        ('{"model_type": "qwen2_moe", "num_experts": "many"}', "config.json"),
    ],
)
def test_a_configuration_that_cannot_be_used(own_checkpoint, tmp_path, config, message):
    (own_checkpoint / "config.json").write_text(config)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        prepare(own_checkpoint, tmp_path / "store")
    assert "\n" not in str(caught.value)


def test_an_already_quantised_checkpoint(own_checkpoint, tmp_path):
    text = (own_checkpoint / "config.json").read_text().rstrip()
    quantised = text[:-1] + ', "quantization_config": {"quant_method": "gptq", "bits": 4}}'
    (own_checkpoint / "config.json").write_text(quantised)
    with pytest.raises(SourceError, match="is already quantised; prepare from its bf16, fp16 or fp32 original"):
        prepare(own_checkpoint, tmp_path / "store")


def test_nothing_where_a_checkpoint_should_be(tmp_path):
    with pytest.raises(SourceError, match="nowhere does not exist; give the directory .* or a hub id like org/name"):
        prepare(tmp_path / "nowhere", tmp_path / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="empty has no .safetensors weights"):
        prepare(tmp_path / "empty", tmp_path / "store")
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(SourceError, match=r"note\.txt is a file; give the directory"):
        prepare(tmp_path / "note.txt", tmp_path / "store")


def test_gguf_files(tmp_path):
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04 rather a zip")
    with pytest.raises(SourceError, match=r"fake\.gguf is not a GGUF file.*download it again"):
        prepare(tmp_path / "fake.gguf", tmp_path / "store")
    (tmp_path / "real.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(SourceError, match=r"real\.gguf: GGUF checkpoints cannot be prepared; use .* safetensors"):
        prepare(tmp_path / "real.gguf", tmp_path / "store")


def test_no_config(own_checkpoint, tmp_path):
    (own_checkpoint / "config.json").unlink()
    with pytest.raises(SourceError, match=r"own-checkpoint holds no model: it has no config\.json"):
        prepare(own_checkpoint, tmp_path / "store")


def test_a_missing_shard(sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "checkpoint")
    victim = sorted((tmp_path / "checkpoint").glob("*.safetensors"))[2]
    victim.unlink()
    with pytest.raises(
        SourceError, match=rf"{victim.name} is missing \(1 of \d+ shards\); download the checkpoint again"
    ):
        prepare(tmp_path / "checkpoint", tmp_path / "store")


def test_an_index_that_names_the_wrong_shard_or_nothing(sharded, tmp_path):
    directory = shutil.copytree(sharded, tmp_path / "checkpoint")
    index = (directory / INDEX_FILE).read_text()
    first, second = sorted(path.name for path in directory.glob("*.safetensors"))[:2]
    (directory / INDEX_FILE).write_text(index.replace(first, second))
    with pytest.raises(SourceError, match=rf"cannot read .* from {second} of .*download the checkpoint again"):
        prepare(directory, tmp_path / "store")
    (directory / INDEX_FILE).write_text(index[:100])
    with pytest.raises(SourceError, match=rf"{INDEX_FILE} is damaged .*download the checkpoint again"):
        prepare(directory, tmp_path / "store-2")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:3],
        lambda content: b"",
        lambda content: content[:40] + b"\xff" + content[41:],
        lambda content: content.replace(b'"F32"', b'"F99"', 1),
        lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n",
    ],
    ids=["truncated", "three bytes", "empty", "header", "dtype", "an LFS pointer"],
)
def test_a_damaged_shard(own_checkpoint, tmp_path, damage):
    shard = own_checkpoint / "model.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(SourceError, match=r"model\.safetensors.*download") as caught:
        prepare(own_checkpoint, tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "key", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate.weight"]
)
def test_a_missing_tensor(own_checkpoint, tmp_path, key):
    edit(own_checkpoint, lambda tensors: tensors.pop(key))
    with pytest.raises(SourceError, match=f"the checkpoint lacks 1 tensors of the model, the first: {key}"):
        prepare(own_checkpoint, tmp_path / "store")


def test_missing_experts(own_checkpoint, tmp_path):
    edit(own_checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.experts.5.down_proj.weight"))
    with pytest.raises(
        (SourceError, UnsupportedModelError), match=r"model\.layers\.1\.mlp\.experts\.down_proj.* 7 .*8"
    ):
        prepare(own_checkpoint, tmp_path / "store")


@pytest.mark.parametrize(
    "key",
    [
        "model.norm.weight",
        "model.layers.1.mlp.experts.5.down_proj.weight",
        "model.layers.2.mlp.experts.0.up_proj.weight",
    ],
)
def test_a_tensor_of_the_wrong_shape(own_checkpoint, tmp_path, key):
    edit(own_checkpoint, lambda tensors: tensors.update({key: tensors[key][..., :-8].contiguous()}))
    with pytest.raises(SourceError, match="the checkpoint does not match its config.json") as caught:
        prepare(own_checkpoint, tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_more_fused_experts_than_the_configuration_says(checkpoint, tmp_path):
    directory = shutil.copytree(checkpoint("gpt_oss"), tmp_path / "checkpoint")
    name = "model.layers.1.mlp.experts.down_proj"
    edit(directory, lambda tensors: tensors.update({name: torch.cat([tensors[name], tensors[name][:1]])}))
    with pytest.raises(SourceError, match=rf"{name} in .* holds 5 experts where config\.json says 4"):
        prepare(directory, tmp_path / "store", "bf16")


def test_a_store_of_int8_where_the_shape_does_not_allow_int4(tmp_path):
    config = tiny_config("qwen3_moe")
    config.moe_intermediate_size = 33
    save_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path / "odd")
    with pytest.raises(ConfigError, match="int4 needs an even number of input features, got 33; choose --experts int8"):
        prepare(tmp_path / "odd", tmp_path / "store", "int4")
    prepare(tmp_path / "odd", tmp_path / "store", "int8")


def test_the_source_is_only_read(own_checkpoint, tmp_path):
    before = content(own_checkpoint)
    for path in own_checkpoint.iterdir():
        path.chmod(0o444)
    prepare(own_checkpoint, tmp_path / "store", "bf16")
    assert content(own_checkpoint) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_in_half_precision(dtype, tmp_path):
    write_checkpoint("qwen2_moe", tmp_path / "checkpoint", dtype)
    with open_engine(prepare(tmp_path / "checkpoint", tmp_path / "store", "bf16"), 3) as engine:
        assert engine.info.resident_bytes < os.path.getsize(tmp_path / "checkpoint/model.safetensors")
        assert greedy(engine, PROMPT, 3)[0] == reference_greedy(reference(tmp_path / "checkpoint", dtype), PROMPT, 3)[0]
