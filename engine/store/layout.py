"""A store is a directory whose `store.json` says exactly where every byte of every expert lies, and proves itself
intact.

store.json            format version, model shape, record layout, provenance, its own checksum
experts.bin           one record an expert, layer-major, each starting at a multiple of 4096 bytes
resident.safetensors  every tensor that is not a routed expert
config.json, tokenizer files, chat template, generation_config.json as in the source
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.errors import StoreError
from engine.kernels.formats import MatrixFormat

FORMAT_VERSION = 2
_READABLE = (1, 2)  # version 1 held no resident weights in int4
ALIGNMENT = 4096  # direct I/O needs file offset, length and memory address aligned to the device's block
INFO_FILE, EXPERTS_FILE, RESIDENT_FILE = "store.json", "experts.bin", "resident.safetensors"


@dataclass(frozen=True)
class Field:
    """One tensor inside a record. offset and nbytes in bytes from the record's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, record: torch.Tensor) -> torch.Tensor:
        """The tensor inside `record` [record_bytes] uint8, without a copy."""
        return record[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class RecordLayout:
    """Where an expert's tensors lie in its record. formats: matrix name (`gate_up` or `up`, `down`) -> its format."""

    formats: dict[str, MatrixFormat]
    fields: tuple[Field, ...]
    record_bytes: int

    @staticmethod
    def make(formats: dict[str, MatrixFormat], biases: dict[str, int], alignment: int = ALIGNMENT) -> RecordLayout:
        """Lay out the matrices' tensors, then the bf16 biases (name -> length), each 64-byte aligned.

        alignment: of the records, a multiple of 64.
        """
        fields, offset = [], 0
        wanted = [(m + s, d, shape) for m, f in formats.items() for s, (d, shape) in f.tensors().items()]
        wanted += [(name, torch.bfloat16, (length,)) for name, length in biases.items()]
        for name, dtype, shape in wanted:
            nbytes = dtype.itemsize
            for size in shape:
                nbytes *= size
            fields.append(Field(name, str(dtype).removeprefix("torch."), shape, offset, nbytes))
            offset = -(-(offset + nbytes) // 64) * 64
        return RecordLayout(formats, tuple(fields), -(-offset // alignment) * alignment)

    @property
    def packing(self) -> str:
        """The processor-dependent packing inside the records, `plain` when there is none."""
        return next((f.packing for f in self.formats.values() if f.packing not in ("", "plain")), "plain")

    def views(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> tensor inside `record` [record_bytes] uint8, without copies."""
        return {f.name: f.view(record) for f in self.fields}

    def encode(self, tensors: dict[str, torch.Tensor | dict[str, torch.Tensor]]) -> torch.Tensor:
        """An expert's matrices and biases by name -> its record [record_bytes] uint8.

        A matrix is given in floats, or as its format's tensors by suffix when it is encoded already.
        """
        record = torch.zeros(self.record_bytes, dtype=torch.uint8)
        views = self.views(record)
        for name, tensor in tensors.items():
            if name in self.formats:
                parts = tensor if isinstance(tensor, dict) else self.formats[name].encode(tensor)
                for suffix, part in parts.items():
                    views[name + suffix].copy_(part)
            else:
                views[name].copy_(tensor)
        return record


@dataclass(frozen=True)
class StoreInfo:
    """Everything `store.json` holds. layers: module path of each experts module, in forward order."""

    model_type: str
    architecture: str
    layers: tuple[str, ...]
    experts: int
    top_k: int
    hidden: int
    expert_format: str
    layout: RecordLayout
    resident_bytes: int
    kv_bytes_per_token: int
    kv_bytes_fixed: int
    quantised_share: float  # of all weights, by count
    source: str
    source_sha256: str  # the source's fingerprint
    resident_format: str = "native"  # or `int4`: see `engine/store/resident.py`
    resident_packing: str = "plain"  # of the resident int4 weights
    crc32: tuple[int, ...] = field(default=(), repr=False)  # one a record, layer-major
    experts_file: str = EXPERTS_FILE
    version: int = FORMAT_VERSION

    @property
    def expert_bytes_total(self) -> int:
        return len(self.layers) * self.experts * self.layout.record_bytes

    @property
    def packing(self) -> str:
        """The layout's."""
        return self.layout.packing


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_info(directory: Path, info: StoreInfo) -> None:
    """Write `store.json` under a temporary name, then rename, so that it is whole or absent."""
    content = json.loads(json.dumps(asdict(info)))
    temporary = directory / (INFO_FILE + ".tmp")
    temporary.write_text(json.dumps({"checksum": _checksum(content), "store": content}, indent=1))
    temporary.replace(directory / INFO_FILE)


def read_info(directory: Path) -> StoreInfo:
    """Read and check a store's description and the sizes of its files.

    Raises StoreError, naming the file, when anything is missing, damaged, truncated or of another version.
    """
    path = directory / INFO_FILE
    again = "prepare the model again (`python -m engine prepare SOURCE DESTINATION`)"
    if not path.is_file():
        raise StoreError(f"{directory} is not a prepared store: it has no {INFO_FILE}; {again}")
    try:
        document = json.loads(path.read_text())
        content, checksum = document["store"], document["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({type(error).__name__}); {again}") from error
    if _checksum(content) != checksum:
        raise StoreError(f"{path} is damaged: its checksum does not match; {again}")
    if content["version"] not in _READABLE:
        raise StoreError(f"{path} has format version {content['version']}, this engine reads "
                         f"{' and '.join(map(str, _READABLE))}; {again}")  # fmt: skip
    layout = content.pop("layout")
    formats = {n: MatrixFormat(**{**f, "shape": tuple(f["shape"])}) for n, f in layout["formats"].items()}
    fields = tuple(Field(**{**f, "shape": tuple(f["shape"])}) for f in layout["fields"])
    info = StoreInfo(**{**content, "layers": tuple(content["layers"]), "crc32": tuple(content["crc32"]),
                        "layout": RecordLayout(formats, fields, layout["record_bytes"])})  # fmt: skip
    _check_size(directory / info.experts_file, info.expert_bytes_total, again)
    _check_size(directory / RESIDENT_FILE, info.resident_bytes, again)
    return info


def _check_size(path: Path, least: int, again: str) -> None:
    if not path.is_file():
        raise StoreError(f"{path} is missing; {again}")
    if path.stat().st_size < least:
        raise StoreError(f"{path} is truncated: {path.stat().st_size} bytes where {least} are needed; {again}")
