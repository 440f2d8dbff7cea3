"""A draft is built once, whole, and found again; one that is not this model's, or not whole, is refused with the way out."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch

from engine.errors import ConfigError, StoreError
from engine.kernels import int4
from engine.store import draft
from engine.store.draft import build_draft, draft_bytes, draft_layout, find_draft
from engine.store.layout import read_info
from engine.store.progress import CancelledError
from engine.store.verify import read_records
from tests.streaming import stored_experts


def records(file) -> list[dict[str, torch.Tensor]]:
    """Matrix or bias name -> fp32 tensor, of every record of a draft."""
    result = []
    for record in read_records(file.path, file.layout.record_bytes):
        views = file.layout.views(torch.frombuffer(bytearray(record), dtype=torch.uint8))
        tensors = {name: form.decode({suffix: views[name + suffix] for suffix in form.tensors()})
                   for name, form in file.layout.formats.items()}  # fmt: skip
        result.append(tensors | {name: views[name].float() for name in views if name.endswith("_bias")})
    return result


@pytest.mark.parametrize("experts", ["bf16", "int4"])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_its_records_are_the_targets_experts_quantised(bits, experts, own_store):
    directory = own_store("gpt_oss", experts)
    info = read_info(directory)
    assert build_draft(directory, info, bits) == directory / f"draft-{bits}.bin"
    made = records(find_draft(directory, info, bits))
    assert len(made) == len(info.layers) * info.experts
    for (_, _, target), drafted in list(zip(stored_experts(directory), made, strict=True))[:: info.experts]:
        assert target.keys() == drafted.keys() == {"gate_up", "down", "gate_up_bias", "down_bias"}
        for name, wanted in target.items():
            if name.endswith("_bias"):
                assert torch.equal(drafted[name], wanted)
                continue
            group = int4.choose_group(wanted.shape[1])
            q, scales_and_zeros = int4.quantise(wanted, group, bits)
            assert torch.equal(drafted[name], int4.dequantise(int4.pack(q, "plain"), scales_and_zeros, "plain"))


def test_it_is_built_once(own_store):
    directory = own_store()
    info, steps = read_info(directory), []
    path = build_draft(directory, info, 4, steps.append)
    assert [step.done for step in steps] == list(range(24)) and {step.total for step in steps} == {24}
    assert path.stat().st_size == draft_bytes(info, 4)
    before = path.stat().st_mtime_ns
    assert build_draft(directory, info, 4, steps.append) == path
    assert path.stat().st_mtime_ns == before and len(steps) == 24
    assert find_draft(directory, info, 4).path == path


def test_fewer_bits_take_fewer_bytes(store):
    info = read_info(store("qwen2_moe"))
    sizes = [draft_bytes(info, bits) for bits in (4, 3, 2)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 0.35 * info.expert_bytes_total


def test_one_that_was_never_made(own_store):
    directory = own_store()
    command = rf"has no 3-bit draft: make one with `python -m engine draft {directory} --bits 3`"
    with pytest.raises(StoreError, match=command):
        find_draft(directory, read_info(directory), 3)


def test_one_of_another_model(own_store):
    directory = own_store()
    info = read_info(directory)
    build_draft(directory, info, 4)
    other = replace(info, source_sha256="0" * 64)
    message = rf"draft-4.bin is a draft of another model: remove .*draft-4.json and run `python -m engine draft {directory}"
    for attempt in (find_draft, build_draft):
        with pytest.raises(StoreError, match=message):
            attempt(directory, other, 4)


@pytest.mark.parametrize("size", [0, 100, None])
def test_one_that_is_truncated_or_gone(size, own_store):
    directory = own_store()
    info = read_info(directory)
    path = build_draft(directory, info, 4)
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
    message = rf"{path} has {size or 0} bytes where {draft_bytes(info, 4)} are needed: remove .*json and run `python -m engine"
    for attempt in (find_draft, build_draft):
        with pytest.raises(StoreError, match=message):
            attempt(directory, info, 4)
    (directory / "draft-4.json").unlink()  # as the message says
    build_draft(directory, info, 4)
    assert find_draft(directory, info, 4).path == path


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"packing": "plain"}'])
def test_a_description_that_is_damaged(content, own_store):
    directory = own_store()
    build_draft(directory, read_info(directory), 2)
    (directory / "draft-2.json").write_text(content)
    message = r"draft-2.json is damaged \(\w+\); remove it and run `python -m engine draft .* --bits 2`"
    with pytest.raises(StoreError, match=message):
        find_draft(directory, read_info(directory), 2)


@pytest.mark.parametrize("after", [0, 5, 23])
def test_interrupted_it_is_not_there_and_can_be_made_again(after, own_store):
    directory, cancel = own_store(), threading.Event()
    info = read_info(directory)

    def watch(progress) -> None:
        if progress.done == after:
            cancel.set()

    if after < 23:
        with pytest.raises(CancelledError):
            build_draft(directory, info, 4, watch, cancel)
    else:
        with pytest.raises(KeyboardInterrupt):
            build_draft(directory, info, 4, lambda progress: (_ for _ in ()).throw(KeyboardInterrupt))
    assert not (directory / "draft-4.bin").exists()
    with pytest.raises(StoreError, match="has no 4-bit draft"):
        find_draft(directory, info, 4)
    build_draft(directory, info, 4)
    assert find_draft(directory, info, 4).path.stat().st_size == draft_bytes(info, 4)
    assert not list(directory.glob("*.tmp"))


def test_records_without_a_description_are_no_draft(own_store):
    """A kill between the two files: the records are made again."""
    directory = own_store()
    info = read_info(directory)
    path = build_draft(directory, info, 4)
    whole = path.read_bytes()
    path.write_bytes(b"half a dr")
    (directory / "draft-4.json").unlink()
    build_draft(directory, info, 4)
    assert path.read_bytes() == whole


def test_bits_that_there_are_none_of(own_store):
    directory = own_store()
    with pytest.raises(ConfigError, match="draft bits 5 is not possible: choose from 4, 3, 2"):
        build_draft(directory, read_info(directory), 5)


def test_a_disk_without_room(own_store, monkeypatch):
    directory = own_store()
    monkeypatch.setattr(draft.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(StoreError, match=r"a draft needs [\d.]+ KiB of disk and .* has 1000 B free: free some space"):
        build_draft(directory, read_info(directory), 4)
    assert not list(directory.glob("draft-*"))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_every_packing_holds_the_same_numbers(bits, own_store, monkeypatch):
    made = {}
    for packing in ("plain", "avx512", "avx2"):
        directory = own_store()
        info = read_info(directory)
        with monkeypatch.context() as patch:
            patch.setattr(int4, "native_packing", lambda packing=packing: packing)
            build_draft(directory, info, bits)
        assert json.loads((directory / f"draft-{bits}.json").read_text())["packing"] == packing
        file = find_draft(directory, info, bits)
        assert file.layout == draft_layout(info, bits, packing)
        made[packing] = records(file)
        directory.rename(directory.with_name(packing))
    for packing in ("avx512", "avx2"):
        for got, wanted in zip(made[packing], made["plain"], strict=True):
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)
