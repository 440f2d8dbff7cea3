"""Loading builds the skeleton, swaps each experts module for the drop-in, and reads only the resident tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.errors import StoreError
from engine.model.experts import StreamedExperts
from engine.model.skeleton import build_skeleton, find_experts, load_config, parent_of
from engine.store.layout import RESIDENT_FILE, StoreInfo


def load_model(directory: Path, info: StoreInfo, device: torch.device) -> tuple[nn.Module, list[StreamedExperts]]:
    """The model with its resident weights on `device` and its drop-ins, in layer order, not yet attached to a tier.

    Raises StoreError when the store's tensors are not the model's.
    """
    model = build_skeleton(load_config(directory))
    modules = find_experts(model)
    if tuple(modules) != info.layers:
        raise StoreError(
            f"{directory}: store.json and config.json disagree about the MoE layers; prepare the model again"
        )
    drop_ins = []
    for layer, (path, module) in enumerate(modules.items()):
        for name in list(module._parameters):
            del module._parameters[name]  # the store's part; what else the module defines stays
        drop_in = StreamedExperts(module, layer, info.experts)
        parent, name = parent_of(model, path)
        setattr(parent, name, drop_in)
        drop_ins.append(drop_in)
    _load_resident(model, directory / RESIDENT_FILE, {f"{p}.": f"{p}.inner." for p in modules}, device)
    return model.to(device), drop_ins


def _load_resident(model: nn.Module, path: Path, renamed: dict[str, str], device: torch.device) -> None:
    """Read every tensor into memory of our own: a file mapping would be counted, and dropped, behind our back."""
    state = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                name = next((new + key.removeprefix(old) for old, new in renamed.items() if key.startswith(old)), key)
                state[name] = file.get_tensor(key).to(device, copy=True)
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error}); prepare the model again") from error
    try:
        result = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:  # lists every tensor of another shape or kind, a line each
        reason = str(error).strip().splitlines()[-1].strip()
        raise StoreError(f"{path} does not match the model ({reason}); prepare the model again") from error
    model.tie_weights()
    missing = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if missing or result.unexpected_keys:
        raise StoreError(f"{path} does not match the model (missing: {', '.join(missing[:3]) or 'none'}; unknown: "
                         f"{', '.join(result.unexpected_keys[:3]) or 'none'}); prepare the model again")  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_(False)
