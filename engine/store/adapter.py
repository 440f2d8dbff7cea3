"""An adapter is one safetensors file that lies in a store and says in its metadata which model it belongs to."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import StoreError
from engine.store.layout import StoreInfo

HEADS, LORA = "prerouter*.safetensors", "lora*.safetensors"  # what the files of each kind are called


def is_adapter(name: str) -> bool:
    """Whether a file of this name in a checkpoint's main folder is an adapter."""
    return not {"/", "\\"} & set(name) and any(fnmatchcase(name, pattern) for pattern in (HEADS, LORA))


def adapters(directory: Path) -> list[Path]:
    """The files of prerouter heads and recovery LoRAs in a checkpoint's or store's directory."""
    return sorted(path for path in directory.glob("*.safetensors") if is_adapter(path.name))


def find_adapter(directory: Path, pattern: str) -> Path | None:
    """The one file of a store that matches `pattern`, None without one. Raises StoreError for several."""
    found = sorted(directory.glob(pattern))
    if len(found) > 1:
        raise StoreError(f"{directory} holds several adapters ({', '.join(p.name for p in found)}): keep one")
    return found[0] if found else None


def read_adapter(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors by name, metadata). Raises StoreError naming the file when it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, flat_metadata(path, file.metadata())
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is damaged ({error}); get it again") from error


def flat_metadata(path: Path, metadata: dict[str, str] | None) -> dict[str, str]:
    """The metadata of an adapter file. Published files hold all of it as one JSON string under the name `__metadata__`."""
    metadata = dict(metadata or {})
    nested = metadata.pop("__metadata__", None)
    if nested is None:
        return metadata
    try:
        return {**metadata, **{name: str(value) for name, value in json.loads(nested).items()}}
    except (ValueError, AttributeError) as error:
        raise StoreError(f"{path} is damaged: its metadata is no JSON object; get it again") from error


def write_adapter(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write `path` in float16, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    save_file({name: t.to(torch.float16).contiguous() for name, t in tensors.items()}, temporary, metadata=metadata)
    temporary.replace(path)


def check_model(path: Path, metadata: dict[str, str], info: StoreInfo) -> None:
    """Raises StoreError when an adapter says that it belongs to other weights than the store's."""
    belongs = metadata.get("model_sha256")
    if belongs is not None and belongs != info.source_sha256:
        raise StoreError(f"{path} was trained for another model ({metadata.get('model', belongs[:12])}): remove it, or train "
                         "one for this model with `python -m engine train`")  # fmt: skip
