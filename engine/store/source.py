"""A checkpoint source hands out safetensors shards one at a time, so that preparing needs no whole checkpoint at
once."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Protocol

from engine.errors import SourceError
from engine.store.adapter import adapters
from engine.store.layout import INFO_FILE
from engine.store.progress import ProgressCallback

INDEX_FILE = "model.safetensors.index.json"
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of each shard, evenly spaced


class Source(Protocol):
    """name: for messages and provenance. config_dir: a local directory with config, tokenizer and index files.

    shards: safetensors file names in order. `open_shard` returns a local path, fetching the file if it must;
    `release_shard` says its bytes are no longer needed.
    """

    name: str
    config_dir: Path
    shards: list[str]

    def open_shard(self, name: str) -> Path: ...

    def release_shard(self, name: str) -> None: ...

    def close(self) -> None: ...


class LocalSource:
    """A Hugging Face checkpoint directory on this machine. It is only ever read."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self.config_dir = directory
        index = directory / INDEX_FILE
        if index.is_file():
            self.shards = sorted(set(read_index(index).values()))
        else:
            beside = adapters(directory)
            found = sorted(path.name for path in directory.glob("*.safetensors") if path not in beside)
            self.shards = ["model.safetensors"] if "model.safetensors" in found else found  # beside it lie other things
        if not self.shards:
            raise SourceError(f"{directory} has no .safetensors weights; convert the checkpoint to safetensors first")
        missing = [name for name in self.shards if not (directory / name).is_file()]
        if missing:
            raise SourceError(f"{directory / missing[0]} is missing ({len(missing)} of {len(self.shards)} shards); "
                              "download the checkpoint again")  # fmt: skip

    def open_shard(self, name: str) -> Path:
        return self.config_dir / name

    def release_shard(self, name: str) -> None:
        """Nothing to do: the files are the user's."""

    def close(self) -> None:
        """Nothing to do: nothing was fetched."""


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name. Raises SourceError when the index is damaged."""
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} is damaged ({type(error).__name__}); download the checkpoint again") from error


def read_header(path: Path) -> dict[str, dict]:
    """Tensor name -> {dtype, shape, data_offsets} of a safetensors file. Raises SourceError when it is none or
    truncated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise SourceError(f"{path} is not a whole safetensors file; download the checkpoint again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise SourceError(f"{path} has a damaged header; download the checkpoint again") from error
    if size < 8 + length + end:
        raise SourceError(f"{path} is truncated: {size} bytes where {8 + length + end} are needed; download it again")
    return header


def weight_map(source: Source) -> dict[str, str]:
    """Tensor name -> shard file name, from the index or, without one, from the shards' headers."""
    index = source.config_dir / INDEX_FILE
    if index.is_file():
        return read_index(index)
    return {key: shard for shard in source.shards for key in read_header(source.open_shard(shard))}


def fingerprint(source: Source) -> str:
    """sha256 by which a checkpoint is known again: of its configuration, its tensor index, and its version.

    The version is the revision that a hub source's name ends with; of a local one it is samples of its weights, for a
    fine-tuned model has the names and shapes of its base. A checkpoint that a recipe builds says itself what it is, in
    `recipe_sha256` of its configuration: its weights may differ in the last bit from one machine to another.
    """
    config = (source.config_dir / "config.json").read_bytes()
    built = json.loads(config).get("recipe_sha256")
    if built:
        return hashlib.sha256(built.encode()).hexdigest()
    digest = hashlib.sha256(config)
    digest.update(json.dumps(weight_map(source), sort_keys=True).encode())
    if not isinstance(source, LocalSource):
        digest.update(source.name.encode())
        return digest.hexdigest()
    for path in [*(source.open_shard(shard) for shard in source.shards), *adapters(source.config_dir)]:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(size * part // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def open_source(
    source: str | Path, progress: ProgressCallback | None = None, cancel: threading.Event | None = None
) -> Source:
    """A local directory, or a hub id such as `org/name`. Raises SourceError, saying what is wrong with it.

    progress and cancel are for downloads.
    """
    path = Path(source).expanduser()
    if (path / INFO_FILE).is_file():
        raise SourceError(f"{path} is a prepared store already: use it as it is, or prepare from its checkpoint")
    if path.is_dir():
        return LocalSource(path)
    if path.is_file():
        if path.suffix == ".gguf":
            check_gguf(path)
            raise SourceError(f"{path}: GGUF checkpoints cannot be prepared; use the model's safetensors checkpoint")
        raise SourceError(
            f"{path} is a file; give the directory of a Hugging Face checkpoint or a hub id like org/name"
        )
    text = str(source)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and "\\" not in text:
        from engine.store.hub import HubSource  # imports huggingface_hub, not needed for local checkpoints

        return HubSource(text, progress, cancel)
    raise SourceError(
        f"{path} does not exist; give the directory of a Hugging Face checkpoint or a hub id like org/name"
    )


def check_gguf(path: Path) -> None:
    """Raise SourceError unless `path` starts as a GGUF file does."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SourceError(f"{path} is not a GGUF file: it does not start with the GGUF magic; download it again")
