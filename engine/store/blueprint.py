"""Before a byte is written it is known what a store will be: every tensor, its format and its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from engine.errors import ConfigError, SourceError, UnsupportedModelError
from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.memory.kv import kv_bytes
from engine.model.resident import int4_format, quantisable
from engine.model.skeleton import ExpertsShape, build_skeleton, experts_shape, find_experts, top_k
from engine.store.checkpoint import Checkpoint
from engine.store.layout import RecordLayout, StoreInfo
from engine.store.mapping import Unit, plan_units
from engine.store.mlx import MlxCheckpoint, is_mlx
from engine.store.resident import ResidentFile
from engine.store.settings import Settings, read_settings
from engine.store.source import Source, fingerprint, weight_map


@dataclass(frozen=True)
class Blueprint:
    """How a checkpoint becomes a store. info: the store's description, its checksums aside.

    units: the pieces of work; unused: names of tensors that the model has no use for; resident: the layout of the
    resident weights.
    """

    settings: Settings
    model: nn.Module
    shape: ExpertsShape
    checkpoint: Checkpoint | MlxCheckpoint
    units: list[Unit]
    unused: list[str]
    info: StoreInfo
    resident: ResidentFile


def draw(source: Source, experts: str | None, resident: str | None, experts_a_token: int | None) -> Blueprint:
    """The blueprint of `source` in the given formats, None for those that suit the checkpoint; see `writer.prepare`."""
    settings = read_settings(source.config_dir, experts_a_token)
    if settings.quantisation is not None and not is_mlx(settings.quantisation):
        raise SourceError(f"{source.name} is already quantised; prepare from its bf16, fp16 or fp32 original, or from a "
                          "checkpoint that MLX quantised")  # fmt: skip
    model = build_skeleton(settings.config)
    modules = find_experts(model)
    shape, paths = experts_shape(modules), list(modules)
    if settings.top_k is not None and not 1 <= settings.top_k <= shape.experts:
        raise ConfigError(f"top k {settings.top_k} is not possible: {source.name} has {shape.experts} experts")
    checkpoint = Checkpoint(source, weight_map(source), shape.experts)
    if settings.quantisation is not None:
        if shape.transposed or not all(getattr(module, "is_concatenated", True) for module in modules.values()):
            raise UnsupportedModelError(f"'{settings.config.model_type}' lays its experts out in a way that is not known of "
                                        "MLX checkpoints; prepare from the original")  # fmt: skip
        checkpoint = MlxCheckpoint(checkpoint, settings.quantisation, model)
    units, unused = plan_units(model, paths, shape, checkpoint.keys)
    kept = _kept(model, units, checkpoint)
    if settings.quantisation is not None:
        _check_all_used(source, model, unused)
        experts = experts or ("int8" if checkpoint.expert_bits() == 8 else "int4")
    coded = set(kept) if resident is None else {*kept, *quantisable(model)} if resident == "int4" else set()
    experts = experts or "int4"
    layout = _record_layout(source, shape, experts)
    file = _resident_file(model, units, coded, checkpoint)
    per_token, fixed = kv_bytes(model)
    parameters = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    routed = len(paths) * shape.experts * shape.parameters()
    total = routed + sum(parameters[name] for name in _made(model, units))
    quantised = (routed if experts != "bf16" else 0) + sum(parameters[f"{path}.weight"] for path in coded)
    info = StoreInfo(
        model_type=settings.config.model_type,
        architecture=type(model).__name__,
        layers=tuple(paths),
        experts=shape.experts,
        top_k=top_k(model, paths[0]),
        hidden=shape.hidden,
        expert_format=experts,
        layout=layout,
        resident_bytes=file.file_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_fixed=fixed,
        quantised_share=quantised / total,
        source=Path(source.name).name if Path(source.name).exists() else source.name,
        source_sha256=fingerprint(source),
        resident_format="int4" if coded else "native",
        resident_packing=int4.native_packing() if coded else "plain",
    )
    if settings.top_k not in (None, info.top_k):
        raise ConfigError(f"'{info.model_type}' routes to {info.top_k} experts whatever its configuration says: leave top "
                          "k out")  # fmt: skip
    return Blueprint(settings, model, shape, checkpoint, units, unused, info, file)


def _record_layout(source: Source, shape: ExpertsShape, experts: str) -> RecordLayout:
    packing = int4.native_packing()
    try:
        formats = {name: MatrixFormat.choose(experts, size, packing) for name, size in shape.matrices().items()}
    except ValueError as error:
        raise ConfigError(f"{source.name}: {error}; choose --experts int8 or bf16") from error
    return RecordLayout.make(formats, shape.biases())


def _kept(model: nn.Module, units: list[Unit], checkpoint: Checkpoint | MlxCheckpoint) -> list[str]:
    """Paths of the resident weights that the checkpoint holds as int4 codes and the model can use as such."""
    possible = quantisable(model, least=0)
    resident = {recipe.target.removesuffix(".weight"): recipe for unit in units if unit.expert is None
                for recipe in unit.recipes if recipe.converter is None}  # fmt: skip
    return [path for path in possible if path in resident
            and all(checkpoint.holds_codes(key) for key in resident[path].all_keys())]  # fmt: skip


def _made(model: nn.Module, units: list[Unit]) -> list[str]:
    """Names of the model's tensors that the resident units make."""
    known = model.state_dict()
    return [name for unit in units if unit.expert is None for name in _targets(unit) if name in known]


def _targets(unit: Unit) -> Iterator[str]:
    """Names of the model tensors a resident unit may make."""
    for recipe in unit.recipes:
        patterns = list(getattr(recipe.converter, "target_patterns", []))
        yield recipe.target
        yield from (recipe.target.replace(patterns[0], other) for other in patterns[1:])


def _resident_file(
    model: nn.Module, units: list[Unit], coded: set[str], checkpoint: Checkpoint | MlxCheckpoint
) -> ResidentFile:
    known, packing = model.state_dict(), int4.native_packing()
    plan = model._get_dtype_plan(model.dtype)  # transformers keeps some modules in fp32 whatever the model's dtype
    exact = [part for part in plan if plan[part] == torch.float32]
    entries = {}
    for name in _made(model, units):
        if name.removesuffix(".weight") in coded:
            continue
        fp32 = any(part in name for part in exact) or checkpoint.needs_fp32(name)
        entries[name] = (torch.float32 if fp32 else known[name].dtype, tuple(known[name].shape))
    return ResidentFile(entries, {path: int4_format(model.get_submodule(path), packing) for path in coded})


def _check_all_used(source: Source, model: nn.Module, unused: list[str]) -> None:
    """Raise SourceError naming a tensor of a converted checkpoint that the model has no place for: a wrong guess at what
    the others mean would show only there."""
    known = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    odd = [key for key in unused if not any(re.search(pattern, key) for pattern in known)]
    if odd:
        raise SourceError(f"{source.name} has {len(odd)} tensors that transformers' {type(model).__name__} does not know, "
                          f"the first: {', '.join(odd[:3])}; prepare from the original")  # fmt: skip
