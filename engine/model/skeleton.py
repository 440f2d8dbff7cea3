"""The skeleton is transformers' own model on the meta device; only its experts modules are the engine's business."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from engine.errors import SourceError, UnsupportedModelError

_CONTRACT = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertsShape:
    """Shape and flags of the experts modules, the same in every layer. Sizes in elements.

    hidden, inner: H and I. gated: the first projection is `gate_up_proj` with 2I rows, else `up_proj` with I.
    transposed: the checkpoint's matrices are [in, out]. biased: both projections have biases.
    """

    experts: int
    hidden: int
    inner: int
    gated: bool
    transposed: bool
    biased: bool

    @property
    def first(self) -> str:
        return "gate_up" if self.gated else "up"

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Matrix name -> [out, in]."""
        return {self.first: ((2 if self.gated else 1) * self.inner, self.hidden), "down": (self.hidden, self.inner)}

    def biases(self) -> dict[str, int]:
        return {f"{name}_bias": rows for name, (rows, _) in self.matrices().items()} if self.biased else {}

    def parameters(self) -> int:
        return sum(r * c for r, c in self.matrices().values()) + sum(self.biases().values())


def load_config(directory: Path):
    """The transformers configuration in `directory`. Raises SourceError or UnsupportedModelError."""
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise SourceError(f"{directory} holds no model: it has no config.json")
    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001 - a configuration class may raise anything on what it does not expect
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(
            f"{directory / 'config.json'} describes no architecture this transformers version knows: {reason}"
        ) from error


def build_skeleton(config, dtype: torch.dtype | None = None) -> nn.Module:
    """The language model of `config` with parameters on the meta device and real (computed) buffers.

    A model that also sees is taken whole where transformers has no class for its text part alone. Raises
    UnsupportedModelError when transformers has no language model for it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = [
        auto for auto in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(config) in auto._model_mapping
    ]
    if not known:
        raise UnsupportedModelError(
            f"'{config.model_type}' is no language model that this transformers version can run"
        )
    try:
        with init_empty_weights(include_buffers=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = known[0].from_config(config, dtype=dtype or model_dtype(config))
    except (ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(f"'{config.model_type}' cannot be built here: {reason}") from error
    return model.eval()


def model_dtype(config) -> torch.dtype:
    """The dtype the checkpoint was saved in; bfloat16 where its config is silent."""
    text = config.get_text_config(decoder=True)
    return getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.bfloat16


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Module path -> experts module, in forward order, for modules with transformers' fused experts contract.

    Raises UnsupportedModelError when there is none, or when experts lie outside the contract.
    """
    found, others = {}, []
    for path, module in model.named_modules():
        if not type(module).__name__.endswith("Experts"):
            continue
        fused = isinstance(getattr(module, "down_proj", None), nn.Parameter) and module.down_proj.ndim == 3
        if fused and hasattr(module, "_apply_gate"):
            found[path] = module
        elif not path.endswith("shared_experts"):  # those serve every token: resident
            others.append(path)
    kind = model.config.model_type
    if others:
        raise UnsupportedModelError(
            f"'{kind}' has experts outside transformers' fused experts contract ({others[0]}): not supported"
        )
    if not found:
        raise UnsupportedModelError(
            f"'{kind}' is not a Mixture-of-Experts model: it has no routed experts to stream; choose an MoE checkpoint"
        )
    return found


def experts_shape(modules: dict[str, nn.Module]) -> ExpertsShape:
    """The one shape all experts modules share. Raises UnsupportedModelError when layers differ."""
    shapes = {path: _shape_of(module) for path, module in modules.items()}
    first = next(iter(shapes.values()))
    odd = next((path for path, shape in shapes.items() if shape != first), None)
    if odd:
        raise UnsupportedModelError(f"experts of {odd} have another shape than the first layer's: not supported")
    return first


def _shape_of(module: nn.Module) -> ExpertsShape:
    down = module.down_proj.shape
    transposed = bool(module.is_transposed)
    inner, hidden = (down[1], down[2]) if transposed else (down[2], down[1])
    return ExpertsShape(down[0], hidden, inner, bool(module.has_gate), transposed, bool(module.has_bias))


def cache_argument(model: nn.Module) -> str:
    """Name of the argument of `model` that takes a Cache; transformers renamed it after 5.20, the last for Python 3.10."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def parent_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds the submodule at `path`, and the attribute it is held under."""
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def find_router(model: nn.Module, experts_path: str) -> str | None:
    """Path of the router beside an experts module (its block's `gate` or `router`), None when there is no such
    module."""
    block_path, _, _ = experts_path.rpartition(".")
    block = model.get_submodule(block_path)
    for name, child in block.named_children():
        if name in ("gate", "router") and ("Router" in type(child).__name__ or "Gate" in type(child).__name__):
            return f"{block_path}.{name}" if block_path else name
    return None


def top_k(model: nn.Module, experts_path: str) -> int:
    """Experts a token is routed to, from the router or the configuration."""
    router = find_router(model, experts_path)
    for holder, names in ((model.get_submodule(router) if router else None, ("top_k", "topk")),
                          (model.config.get_text_config(decoder=True),
                           ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k_experts",
                            "experts_per_token", "moe_top_k"))):  # fmt: skip
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    raise UnsupportedModelError(f"'{model.config.model_type}': cannot tell how many experts a token is routed to")
