"""`resident.safetensors` is laid out before its tensors are known and read one by one, so it is never held twice.

A weight held in int4 is two tensors: `<module path>.q`, nibbles in the packing that `store.json` names (where the shape
allows it, else plain), and `<module path>.sz`; see `engine/kernels/int4.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import SourceError, StoreError
from engine.kernels.formats import MatrixFormat
from engine.memory.block import empty_together
from engine.store.layout import RESIDENT_FILE

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
          torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL", torch.float64: "F64"}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LARGE = 2**20  # bytes


class ResidentFile:
    """The layout of a file of `tensors` (name -> dtype, shape), which can then be written in any order.

    int4: module path -> format of the weights that are written as codes; their names are not in `tensors`.
    """

    def __init__(
        self, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], int4: dict[str, MatrixFormat] | None = None
    ) -> None:
        self.int4 = int4 or {}
        coded = {path + suffix: part for path, form in self.int4.items() for suffix, part in form.tensors().items()}
        self.entries, offset, table = {}, 0, {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape) in sorted({**tensors, **coded}.items()):
            size = dtype.itemsize * torch.Size(shape).numel()
            self.entries[name] = (dtype, shape, offset)
            table[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        self.prefix = len(text).to_bytes(8, "little") + text
        self.file_bytes = len(self.prefix) + offset

    def open(self, directory: Path) -> BinaryIO:
        """The file in `directory`, with its header, keeping what it holds."""
        file = open_sized(directory / RESIDENT_FILE, self.file_bytes)
        file.write(self.prefix)
        return file

    def write(self, file: BinaryIO, name: str, tensor: torch.Tensor | dict[str, torch.Tensor]) -> None:
        """Write the model's tensor `name`: as its codes if they are given or its format is int4."""
        path = name.removesuffix(".weight")
        if path in self.int4 and name != path:
            parts = tensor if isinstance(tensor, dict) else self.int4[path].encode(tensor)
            for suffix, part in parts.items():
                self._write(file, path + suffix, part)
        else:
            self._write(file, name, tensor)

    def _write(self, file: BinaryIO, name: str, tensor: torch.Tensor) -> None:
        dtype, shape, offset = self.entries[name]
        if tuple(tensor.shape) != tuple(shape):
            raise SourceError(f"checkpoint tensor {name} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)}; "
                              "the checkpoint does not match its config.json")  # fmt: skip
        file.seek(len(self.prefix) + offset)
        file.write(tensor.to(dtype).contiguous().flatten().view(torch.uint8).numpy())


def open_sized(path: Path, size: int) -> BinaryIO:
    """`path` opened for writing anywhere in `size` bytes, keeping what it holds."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    return file


def read_resident(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in the file, each read into memory of its own: a file mapping would count twice.

    Raises StoreError naming the file when it is damaged.
    """
    try:
        with safe_open(path, framework="pt"):  # checks the header; maps the file, but touches nothing else of it
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                tensor = _room(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
                file.seek(8 + length + entry["data_offsets"][0])
                file.readinto(tensor.flatten().view(torch.uint8).numpy())
                yield name, tensor
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise StoreError(f"{path} is damaged ({type(error).__name__}: {error}); prepare the model again") from error


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor; a large one has a mapping of its own. In the heap, what computing needs for a moment would
    come to lie between such tensors, and each hole that it leaves would stay in the process's resident set."""
    if torch.Size(shape).numel() * dtype.itemsize < _LARGE:
        return torch.empty(shape, dtype=dtype)
    (tensor,) = empty_together([(shape, dtype)], torch.device("cpu"))
    return tensor
