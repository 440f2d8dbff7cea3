"""A model is named by `default`, by a store's name under `models/`, or by a store's path; all three lead to a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import DEFAULT_MODEL, MODELS_DIR
from engine.errors import OutriderError, StoreError
from engine.store.layout import INFO_FILE, StoreInfo, read_info


@dataclass(frozen=True)
class ModelInfo:
    """What a picker shows of a prepared store. Sizes in bytes."""

    name: str
    path: Path
    architecture: str
    expert_format: str
    layers: int
    experts: int
    top_k: int
    resident_bytes: int
    expert_bytes_total: int
    source: str


def resolve(model: str) -> Path:
    """The store directory that `model` names. Raises StoreError with the way to get one."""
    named = MODELS_DIR / model
    if model == DEFAULT_MODEL or (named / INFO_FILE).is_file():
        if not (named / INFO_FILE).is_file():
            raise StoreError("the default model is not prepared yet: run `python -m engine fetch-default`")
        return named
    path = Path(model).expanduser()
    if (path / INFO_FILE).is_file():
        return path
    if (path / "config.json").is_file():
        raise StoreError(f"{path} is a checkpoint, not a prepared store: run `python -m engine prepare {path} "
                         f"models/{path.name}` first")  # fmt: skip
    known = ", ".join(info.name for info in list_models()) or "none yet"
    raise StoreError(f"no model '{model}': it is neither a prepared store's name ({known}) nor a store's path; prepare one "
                     "with `python -m engine prepare SOURCE DESTINATION`")  # fmt: skip


def describe(path: Path) -> ModelInfo:
    """What the picker shows of the store at `path`. Raises StoreError when it is damaged."""
    return _summary(path, read_info(path))


def list_models() -> list[ModelInfo]:
    """All intact stores under `models/`, the default one first."""
    found = []
    for path in sorted(MODELS_DIR.glob(f"*/{INFO_FILE}")):
        if path.parent.suffix == ".partial":
            continue
        try:
            found.append(describe(path.parent))
        except OutriderError:
            continue  # a damaged store is reported when it is asked for by name
    return sorted(found, key=lambda info: (info.name != DEFAULT_MODEL, info.name))


def _summary(path: Path, info: StoreInfo) -> ModelInfo:
    return ModelInfo(path.name, path, info.architecture, info.expert_format, len(info.layers), info.experts, info.top_k,
                     info.resident_bytes, info.expert_bytes_total, info.source)  # fmt: skip
