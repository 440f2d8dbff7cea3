"""`store.json` proves itself: what it describes is there, and a byte that changed is noticed."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch

from engine.errors import StoreError
from engine.store.layout import ALIGNMENT, MatrixFormat, RecordLayout, _checksum, read_info, write_info
from engine.store.verify import verify
from tests.streaming import open_engine, streamed


def test_records_are_aligned_and_their_fields_apart():
    formats = {
        "gate_up": MatrixFormat.choose("int4", (96, 64), "avx512"),
        "down": MatrixFormat.choose("int8", (64, 48), "plain"),
    }
    layout = RecordLayout.make(formats, {"gate_up_bias": 96, "down_bias": 64})
    assert layout.record_bytes % ALIGNMENT == 0
    end = 0
    for field in layout.fields:
        assert field.offset % 64 == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert end <= layout.record_bytes


def test_a_record_decodes_to_what_was_encoded():
    formats = {
        "gate_up": MatrixFormat.choose("bf16", (96, 64), "plain"),
        "down": MatrixFormat.choose("bf16", (64, 48), "plain"),
    }
    layout = RecordLayout.make(formats, {"down_bias": 64})
    tensors = {"gate_up": torch.randn(96, 64), "down": torch.randn(64, 48), "down_bias": torch.randn(64)}
    views = layout.views(layout.encode(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor.to(torch.bfloat16))


def test_what_was_written_is_read(own_store):
    directory = own_store()
    info = read_info(directory)
    write_info(directory, info)
    assert read_info(directory) == info


def test_any_flipped_bit_of_store_json_is_noticed_or_harmless(own_store):
    directory = own_store(experts="int4")
    path, info = directory / "store.json", read_info(directory)
    content, choice = path.read_bytes(), random.Random(1)
    noticed = 0
    for position in {*range(120), *choice.sample(range(len(content)), 300), len(content) - 1}:
        damaged = bytearray(content)
        damaged[position] ^= 1 << choice.randrange(8)
        path.write_bytes(damaged)
        try:
            assert read_info(directory) == info  # a blank that became another kind of blank
        except StoreError as error:
            assert str(path) in str(error)
            assert "prepare the model again" in str(error)
            noticed += 1
    assert noticed > 200


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"store": 3, "checksum": "x"}', '{"store": {}}', "\xff"])
def test_a_store_json_of_another_kind(own_store, content):
    directory = own_store()
    (directory / "store.json").write_text(content, encoding="latin-1")
    with pytest.raises(StoreError, match=r"store\.json is damaged.*prepare the model again"):
        read_info(directory)


def test_another_format_version(own_store):
    directory = own_store()
    document = json.loads((directory / "store.json").read_text())
    document["store"]["version"] = 99
    document["checksum"] = _checksum(document["store"])
    (directory / "store.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match=r"store\.json has format version 99, this engine reads 1"):
        read_info(directory)


@pytest.mark.parametrize("name", ["experts.bin", "resident.safetensors"])
def test_a_truncated_or_missing_file(own_store, name):
    directory = own_store()
    size = (directory / name).stat().st_size
    os.truncate(directory / name, size - 1)
    with pytest.raises(StoreError, match=rf"{name} is truncated: {size - 1} bytes where {size} are needed.*prepare"):
        read_info(directory)
    (directory / name).unlink()
    with pytest.raises(StoreError, match=rf"{name} is missing.*prepare the model again"):
        read_info(directory)


def test_any_flipped_bit_of_the_resident_header_is_noticed_or_harmless(own_store):
    directory = own_store()
    path = directory / "resident.safetensors"
    content, choice = path.read_bytes(), random.Random(2)
    length = 8 + int.from_bytes(content[:8], "little")
    with open_engine(directory, 3) as engine:
        wanted = {name: tensor.clone() for name, tensor in streamed(engine).state_dict().items()}
    noticed = 0
    for position in {0, 1, 3, 7, 8, *choice.sample(range(9, length), 40)}:
        damaged = bytearray(content)
        damaged[position] ^= 1 << choice.randrange(8)
        path.write_bytes(damaged)
        try:
            with open_engine(directory, 3) as engine:
                got = streamed(engine).state_dict()
                assert got.keys() == wanted.keys()
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        except StoreError as error:
            assert str(path) in str(error)
            assert "prepare the model again" in str(error)
            noticed += 1
    assert noticed > 30


def test_verify_finds_the_damaged_expert(own_store):
    directory = own_store()
    info = read_info(directory)
    verify(directory, lambda progress: None)
    with (directory / "experts.bin").open("r+b") as file:
        file.seek(11 * info.layout.record_bytes + 77)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    place = rf"experts\.bin is damaged at byte {11 * info.layout.record_bytes} \({info.layers[1]}, expert 3\)"
    with pytest.raises(StoreError, match=f"{place}; prepare the model again"):
        verify(directory, lambda progress: None)
