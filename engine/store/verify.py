"""Verifying reads every record of a store once and compares its checksum with the one taken when it was written."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from engine.errors import StoreError
from engine.store.layout import read_info
from engine.store.progress import Progress, ProgressCallback


def read_records(path: Path, record_bytes: int) -> Iterator[bytes]:
    """The records of an experts file, in order."""
    with path.open("rb") as file:
        while record := file.read(record_bytes):
            yield record


def verify(directory: Path, progress: ProgressCallback) -> None:
    """Raise StoreError naming the first damaged record of the store in `directory`, if there is one."""
    info = read_info(directory)
    path = directory / info.experts_file
    total = len(info.layers) * info.experts
    if len(info.crc32) != total:
        raise StoreError(f"{directory} was written without checksums: it cannot be verified")
    for index, record in enumerate(read_records(path, info.layout.record_bytes)):
        if zlib.crc32(record) != info.crc32[index]:
            layer, expert = divmod(index, info.experts)
            raise StoreError(f"{path} is damaged at byte {index * info.layout.record_bytes} ({info.layers[layer]}, expert "
                             f"{expert}); prepare the model again")  # fmt: skip
        progress(Progress("verifying", index + 1, total, "experts"))
