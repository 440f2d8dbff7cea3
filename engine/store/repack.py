"""A store packed for another processor is repacked, never misread: the new file is complete before `store.json` names
it."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import torch

from engine.errors import StoreError
from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.store.layout import RecordLayout, StoreInfo, write_info
from engine.store.verify import read_records


def repack(directory: Path, info: StoreInfo, packing: str) -> StoreInfo:
    """Rewrite the int4 matrices of a store in `packing` and return its new description; sizes and values stay the same.

    Raises StoreError when the new file cannot be written; the store is then as it was.
    """
    formats = {n: _in_packing(f, packing) for n, f in info.layout.formats.items()}
    layout = RecordLayout(formats, info.layout.fields, info.layout.record_bytes)
    old, new = directory / info.experts_file, directory / f"experts-{packing}.bin"
    temporary = new.with_suffix(".tmp")
    checksums = []
    try:
        with temporary.open("wb") as file:
            for record in read_records(old, layout.record_bytes):
                packed = _repack_record(torch.frombuffer(bytearray(record), dtype=torch.uint8), info.layout, layout)
                checksums.append(zlib.crc32(packed.numpy()))
                file.write(packed.numpy())
        temporary.replace(new)
        result = replace(info, layout=layout, crc32=tuple(checksums), experts_file=new.name)
        write_info(directory, result)
        old.unlink()
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(
            f"{directory} is packed for a processor with {info.packing} and this one needs {packing}; it cannot be "
            f"repacked ({error.strerror or error}): free {old.stat().st_size} bytes or make it writable"
        ) from error
    return result


def _in_packing(form: MatrixFormat, packing: str) -> MatrixFormat:
    if form.kind != "int4":
        return form
    return replace(form, packing=int4.choose_packing(form.shape, form.group, packing))


def _repack_record(record: torch.Tensor, old: RecordLayout, new: RecordLayout) -> torch.Tensor:
    """record [record_bytes] uint8, changed in place."""
    for name, form in old.formats.items():
        if form.kind == "int4" and form.packing != new.formats[name].packing:
            nibbles = next(field for field in old.fields if field.name == f"{name}.q").view(record)
            int4.repack(nibbles, form.packing, new.formats[name].packing)
    return record
