"""Every tensor of the model is one unit of work: which checkpoint tensors it is made of, and how they become it.

The renamings and conversions are transformers' own (`conversion_mapping`), applied to one expert at a time where
transformers applies them to a whole layer.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from engine.errors import SourceError, UnsupportedModelError
from engine.model.skeleton import ExpertsShape

Reader = Callable[[str, int | None], torch.Tensor]  # (checkpoint key, row or None for all) -> tensor


@dataclass
class Recipe:
    """How checkpoint tensors become one model tensor: by a converter, or as they are when it is None."""

    target: str
    converter: object | None
    keys: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # source pattern -> checkpoint keys

    def all_keys(self) -> Iterator[str]:
        for keys in self.keys.values():
            yield from keys

    def convert(self, tensors: dict[str, list[torch.Tensor]], model: nn.Module | _OneExpert) -> dict[str, torch.Tensor]:
        """source pattern -> tensors, converted to model tensor name -> tensor. Raises SourceError where shapes clash."""
        if self.converter is None:
            return {self.target: next(iter(tensors.values()))[0]}
        converter = copy.deepcopy(self.converter)
        for pattern, items in tensors.items():
            for key, tensor in zip(self.keys[pattern], items, strict=False):
                converter.add_tensor(self.target, key, pattern, tensor)
        try:
            result = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError) as error:
            raise SourceError(f"cannot make {self.target} of {', '.join(tensors)}: {error}; "
                              "the checkpoint does not match its config.json") from error  # fmt: skip
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


class _OneExpert:
    """The model as a conversion of a single expert's tensors sees it: expert parameters have room for one expert."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.config = model, model.config

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._model.get_parameter(name)[:1]


@dataclass(frozen=True)
class Unit:
    """The smallest piece that can be written: an expert's record, or one resident tensor (or a few made together).

    expert: (layer, expert) for a record, None for a resident unit. recipes: what it is made of.
    """

    name: str
    recipes: tuple[Recipe, ...]
    expert: tuple[int, int] | None = None

    def keys(self, experts: int) -> Iterator[str]:
        """Checkpoint keys this unit reads; `experts` is their number in a layer."""
        for recipe in self.recipes:
            for keys in recipe.keys.values():
                if self.expert is not None and len(keys) == experts and experts > 1:
                    yield keys[self.expert[1]]
                else:
                    yield from keys

    def build(self, model: nn.Module, shape: ExpertsShape, read: Reader) -> dict[str, torch.Tensor]:
        """Read and convert: for a resident unit, model tensor name -> tensor; for an expert, matrix name -> [out,
        in]."""
        built: dict[str, torch.Tensor] = {}
        for recipe in self.recipes:
            if self.expert is None:
                tensors = {p: [read(key, None) for key in keys] for p, keys in recipe.keys.items()}
                built.update(recipe.convert(tensors, model))
            else:
                built.update(self._build_expert(recipe, model, shape, read))
        return built

    def _build_expert(self, recipe: Recipe, model: nn.Module, shape: ExpertsShape, read: Reader) -> dict:
        expert, tensors, whole = self.expert[1], {}, False
        for pattern, keys in recipe.keys.items():
            if len(keys) == shape.experts and shape.experts > 1:  # one checkpoint tensor an expert
                tensors[pattern] = [read(keys[expert], None)]
            else:  # fused over experts already: take this expert's slice, in a dimension of size one
                row = read(keys[0], expert) if len(keys) == 1 else None
                whole = whole or row is None
                tensors[pattern] = [read(key, None) for key in keys] if row is None else [row]
        result = recipe.convert(tensors, model if whole else _OneExpert(model))
        final = {}
        for name, tensor in result.items():
            tensor = tensor[expert] if whole else tensor[0] if tensor.shape[0] == 1 else tensor
            matrix = name.rpartition(".")[2].removesuffix("_bias").removesuffix("_proj")
            bias = name.endswith("_bias")
            if not bias and shape.transposed:
                tensor = tensor.t()
            wanted = (shape.biases()[f"{matrix}_bias"],) if bias else shape.matrices()[matrix]
            if tuple(tensor.shape) != wanted:
                raise SourceError(f"checkpoint tensor for {name} of expert {expert} has shape {tuple(tensor.shape)}, "
                                  f"the model needs {wanted}; the checkpoint does not match its config.json")  # fmt: skip
            final[matrix + ("_bias" if bias else "")] = tensor
        return final


def plan_units(
    model: nn.Module, expert_paths: list[str], shape: ExpertsShape, checkpoint_keys: list[str]
) -> tuple[list[Unit], list[str]]:
    """All units that make `model` from a checkpoint, and the checkpoint keys the model has no use for.

    Raises SourceError, naming the first tensors, when the checkpoint lacks any the model needs.
    """
    recipes, unused = _recipes(model, checkpoint_keys)
    units: list[Unit] = []
    expert_recipes: dict[str, list[Recipe]] = defaultdict(list)
    for target, recipe in recipes.items():
        path = target.rpartition(".")[0]
        if path in expert_paths:
            expert_recipes[path].append(recipe)
        else:
            units.append(Unit(target, (recipe,)))
    missing = _missing(model, expert_paths, shape, recipes)
    if missing:
        raise SourceError(f"the checkpoint lacks {len(missing)} tensors of the model, the first: {', '.join(missing[:3])}; "
                          "it is incomplete or of another architecture than its config.json says")  # fmt: skip
    for layer, path in enumerate(expert_paths):
        for expert in range(shape.experts):
            units.append(Unit(f"{path}[{expert}]", tuple(expert_recipes[path]), (layer, expert)))
    return units, unused


def module_path(model: nn.Module, name: str) -> str:
    """The path in `model` of the module that the checkpoint calls `name`, by transformers' renamings."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [m for m in get_model_conversion_mapping(model) if isinstance(m, WeightRenaming)]
    wanted = {f"{path}.weight": None for path, _ in model.named_modules()}
    target, _ = rename_source_key(f"{name}.weight", renamings, [], model.base_model_prefix, wanted)
    return target.removesuffix(".weight")


def _recipes(model: nn.Module, checkpoint_keys: list[str]) -> tuple[dict[str, Recipe], list[str]]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    recipes: dict[str, Recipe] = {}
    unused = []
    for key in sorted(checkpoint_keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if target not in wanted and key in wanted:
            target, pattern = key, None
        if target not in wanted:
            unused.append(key)
            continue
        recipe = recipes.setdefault(target, Recipe(target, by_pattern[pattern] if pattern else None))
        recipe.keys[pattern or key].append(key)
    return recipes, unused


def _missing(model: nn.Module, expert_paths: list[str], shape: ExpertsShape, recipes: dict[str, Recipe]) -> list[str]:
    """Model tensors no recipe makes, leaving out tied ones and those transformers itself allows to be missing."""
    made = set()
    for target, recipe in recipes.items():
        made.add(target)
        targets = list(getattr(recipe.converter, "target_patterns", []))
        made.update(target.replace(targets[0], other) for other in targets[1:])
    optional = [*(model._keys_to_ignore_on_load_missing or ()), *_tied(model)]
    missing = [n for n in model.state_dict() if n not in made and not any(re.search(p, n) for p in optional)]
    for path in expert_paths:
        for recipe in (r for t, r in recipes.items() if t.rpartition(".")[0] == path):
            for pattern, keys in recipe.keys.items():
                if len(keys) not in (1, shape.experts):
                    raise UnsupportedModelError(
                        f"{recipe.target} is made of {len(keys)} checkpoint tensors like '{pattern}' where "
                        f"1 or {shape.experts} are expected: experts are missing or stored in an unknown way"
                    )
    return missing


def _tied(model: nn.Module) -> list[str]:
    """Patterns of tensors that share another one's storage, when the configuration ties them."""
    return [f"^{re.escape(name)}$" for name in (getattr(model, "all_tied_weights_keys", None) or {})]
