"""A store's config.json is the checkpoint's, less what preparing undoes: it describes the model that transformers runs.

Left out are a quantisation that the store has taken over and remote code; added are a model type that the checkpoint
leaves to its remote code, and the experts a token when another number than the checkpoint's is asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import ConfigError, SourceError, StoreError, UnsupportedModelError
from engine.model.skeleton import load_config
from engine.store.adapter import HEADS, flat_metadata

_QUANTISED = ("quantization", "quantization_config", "compression_config")
_TOP_K = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k_experts", "experts_per_token",
          "moe_top_k")  # fmt: skip
_MODEL_TYPES = {"BailingMoeV3ForCausalLM": "bailing_hybrid"}  # of checkpoints that name only their remote class


@dataclass(frozen=True)
class Settings:
    """config: transformers' configuration; content: of config.json, None where it stays as it is.

    quantisation: how the checkpoint is quantised, in its own words; None when it is not. top_k: the experts a token that
    were asked for, None when the checkpoint's own number stands.
    """

    config: Any
    content: dict | None
    quantisation: dict | None
    top_k: int | None


def read_settings(directory: Path, top_k: int | None) -> Settings:
    """The settings of the checkpoint in `directory` with `top_k` experts a token.

    top_k: None takes the number its prerouter heads were trained for, else its own. Raises ConfigError, SourceError or
    UnsupportedModelError.
    """
    raw = _read(directory / "config.json")
    if raw is None:
        return Settings(load_config(directory), None, None, None)  # says what is wrong
    content = {name: value for name, value in raw.items() if name not in _QUANTISED}
    quantisation = next((raw[name] for name in _QUANTISED if raw.get(name)), None)
    known = next((_MODEL_TYPES[name] for name in raw.get("architectures") or () if name in _MODEL_TYPES), None)
    if known and "model_type" not in raw:
        content = {"model_type": known, **{name: value for name, value in content.items() if name != "auto_map"}}
    top_k = trained_top_k(directory) if top_k is None else top_k
    if content == raw and top_k is None:
        return Settings(load_config(directory), None, quantisation, None)
    config = _build(directory, content)
    if top_k is not None and _set_top_k(content, config, top_k):
        config = _build(directory, content)
    return Settings(config, content if content != raw else None, quantisation, top_k)


def trained_top_k(directory: Path) -> int | None:
    """Experts a token that the prerouter heads in `directory` were trained for; None without heads that say so."""
    found = set()
    for path in sorted(directory.glob(HEADS)):
        try:
            with safe_open(path, framework="pt") as file:
                k = flat_metadata(path, file.metadata()).get("K")
            found |= {int(k)} if k else set()
        except (SafetensorError, OSError, ValueError, StoreError) as error:
            raise SourceError(f"{path} is damaged ({error}); download it again or remove it") from error
    if len(found) > 1:
        raise SourceError(f"the prerouter heads in {directory} are for {' and '.join(map(str, sorted(found)))} experts a "
                          "token: keep the ones that are wanted")  # fmt: skip
    return next(iter(found), None)


def _read(path: Path) -> dict | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


def _build(directory: Path, content: dict):
    from transformers import CONFIG_MAPPING

    kind = content.get("model_type")
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(content))
    except Exception as error:  # noqa: BLE001 - a configuration class may raise anything on what it does not expect
        reason = f"model_type {kind}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UnsupportedModelError(
            f"{directory / 'config.json'} describes no architecture this transformers version knows: {reason}"
        ) from error


def _set_top_k(content: dict, config, top_k: int) -> bool:
    """Write `top_k` into config.json's `content`, under the name the architecture has for it; whether that changed it."""
    text = config.get_text_config(decoder=True)
    name = next((name for name in _TOP_K if isinstance(getattr(text, name, None), int)), None)
    if name is None:
        raise ConfigError(f"'{config.model_type}' has no setting for the experts a token: leave top k out")
    if getattr(text, name) == top_k:
        return False
    holder = content["text_config"] if isinstance(content.get("text_config"), dict) else content
    names = [other for other in _TOP_K if other in holder] or [name]
    holder.update(dict.fromkeys(names, top_k))
    return True
