"""A draft is the target's own experts, quantised once more: one record an expert, in the target's order, in a file beside
theirs.

draft-4.bin    the records of a 4-bit draft
draft-4.json   its bits and packing and the weights it was made of; written last, so that it vouches for the records
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import DRAFT_BITS, format_size
from engine.errors import ConfigError, StoreError
from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.store.layout import RecordLayout, StoreInfo
from engine.store.progress import Progress, ProgressCallback, check_cancelled
from engine.store.verify import read_records


@dataclass(frozen=True)
class DraftFile:
    """Where the records of a draft lie and how."""

    path: Path
    bits: int
    layout: RecordLayout


def draft_layout(info: StoreInfo, bits: int, packing: str) -> RecordLayout:
    """How an expert of a draft is laid out: the target's matrices in `bits` bits, its biases as they are.

    Draft records are loaded once and in order, so they need none of the alignment that makes a record one direct read. Raises
    ConfigError for shapes that `bits` do not suit.
    """
    try:
        formats = {name: MatrixFormat.choose(f"int{bits}", f.shape, packing) for name, f in info.layout.formats.items()}
    except ValueError as error:
        raise ConfigError(f"a {bits}-bit draft of these experts is not possible: {error}") from error
    biases = {field.name: field.shape[0] for field in info.layout.fields if field.name.endswith("_bias")}
    return RecordLayout.make(formats, biases, alignment=64)


def draft_bytes(info: StoreInfo, bits: int) -> int:
    """Bytes of all experts of a draft; no packing changes them."""
    return len(info.layers) * info.experts * draft_layout(info, bits, "plain").record_bytes


def find_draft(directory: Path, info: StoreInfo, bits: int) -> DraftFile:
    """The draft of `bits` bits in the store at `directory`. Raises StoreError when there is none or it is another model's."""
    path, about = _paths(directory, bits)
    command = f"`python -m engine draft {directory} --bits {bits}`"
    if not about.is_file():
        raise StoreError(f"{directory.name} has no {bits}-bit draft: make one with {command}")
    try:
        written = json.loads(about.read_text())
        packing, belongs = written["packing"], written["model_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{about} is damaged ({type(error).__name__}); remove it and run {command}") from error
    if belongs != info.source_sha256:
        raise StoreError(f"{path} is a draft of another model: remove {about} and run {command}")
    size = path.stat().st_size if path.is_file() else 0
    if size != draft_bytes(info, bits):
        raise StoreError(f"{path} has {size} bytes where {draft_bytes(info, bits)} are needed: remove {about} and run {command}")
    return DraftFile(path, bits, draft_layout(info, bits, packing))


def build_draft(
    directory: Path,
    info: StoreInfo,
    bits: int,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Quantise the experts of the store at `directory` to a draft of `bits` bits, fitted by hqq; returns its file.

    One expert is in memory at a time. A draft that is there is left as it is. Raises ConfigError for bits that there are
    none of or shapes that they do not suit, StoreError when the disk does not have the room.
    """
    if bits not in DRAFT_BITS:
        raise ConfigError(f"draft bits {bits} is not possible: choose from {', '.join(map(str, DRAFT_BITS))}")
    report = progress or (lambda _: None)
    path, about = _paths(directory, bits)
    if about.is_file():
        return find_draft(directory, info, bits).path
    layout = draft_layout(info, bits, int4.native_packing())
    total = len(info.layers) * info.experts
    temporary = path.with_suffix(".tmp")
    with _disk_errors(directory, total * layout.record_bytes), temporary.open("wb") as file:
        for index, record in enumerate(read_records(directory / info.experts_file, info.layout.record_bytes)):
            check_cancelled(cancel)
            report(Progress(f"quantising a {bits}-bit draft of {directory.name}", index, total, "experts"))
            file.write(_quantise(record, info.layout, layout).numpy())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    about.write_text(json.dumps({"bits": bits, "packing": layout.packing, "model_sha256": info.source_sha256}) + "\n")
    return path


def _quantise(record: bytes, target: RecordLayout, draft: RecordLayout) -> torch.Tensor:
    views = target.views(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    weights = {}
    for name, form in target.formats.items():
        weights[name] = form.decode({suffix: views[name + suffix] for suffix in form.tensors()})
    return draft.encode({**{name: views[name] for name in views if name.endswith("_bias")}, **weights})


def _paths(directory: Path, bits: int) -> tuple[Path, Path]:
    return directory / f"draft-{bits}.bin", directory / f"draft-{bits}.json"


@contextmanager
def _disk_errors(directory: Path, needed: int) -> Iterator[None]:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StoreError(f"a draft needs {format_size(needed)} of disk and {directory} has {format_size(free)} free: free some "
                         "space")  # fmt: skip
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write a draft into {directory} ({error.strerror or error}): free some space") from error
