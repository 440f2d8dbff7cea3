"""An asset is one safetensors file: what training adds to the dense model, and the provenance to check it
against.

Tensors: `layers.{i}.mlp.order` [neurons] int16 and `layers.{i}.mlp.router` [experts, hidden] and, for every
linear, `{linear}.a` [rank, in] and `{linear}.b` [out, rank], bfloat16. Metadata values are strings; `split`
and `figures` hold JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import SourceError
from engine.train.split import SplitShape
from engine.train.student import Student

FORMAT = "outrider-smolmoe-1"


@dataclass(frozen=True)
class Asset:
    shape: SplitShape
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def student_tensors(student: Student) -> dict[str, Tensor]:
    """What of a student goes into an asset, as stored."""
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in student.trained().items()}
    for i, layer in enumerate(student.lm.model.layers):
        tensors[f"layers.{i}.mlp.order"] = layer.mlp.order.to(torch.int16)
    return tensors


def save_asset(path: Path, shape: SplitShape, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    temporary = path.with_suffix(".partial")
    split = json.dumps(vars(shape))
    save_file(tensors, temporary, metadata={"format": FORMAT, "split": split, **metadata})
    temporary.replace(path)


def load_asset(path: Path) -> Asset:
    """Raises SourceError when the file is missing, damaged or no such asset."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise SourceError(f"cannot read the asset {path} ({error}); restore it from the repository") from error
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "none")
        raise SourceError(f"{path} has format '{found}', expected '{FORMAT}'; it belongs to another version")
    return Asset(SplitShape(**json.loads(metadata["split"])), tensors, metadata)
