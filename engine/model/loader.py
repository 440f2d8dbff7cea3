"""Loading builds the skeleton, swaps each experts module for the drop-in, and reads only the resident tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from engine.errors import StoreError
from engine.kernels import int4
from engine.model.experts import StreamedExperts
from engine.model.resident import int4_format, machine_packing, replace_module, tied_modules
from engine.model.skeleton import build_skeleton, find_experts, load_config, parent_of
from engine.store.layout import RESIDENT_FILE, StoreInfo
from engine.store.resident import read_resident


def load_model(directory: Path, info: StoreInfo, device: torch.device) -> tuple[nn.Module, list[StreamedExperts]]:
    """The model with its resident weights on `device` and its drop-ins, in layer order, not yet attached to a tier.

    What the store holds in int4 stays int4. Raises StoreError when the store's tensors are not the model's.
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
    _load_resident(model, directory / RESIDENT_FILE, {f"{p}.": f"{p}.inner." for p in modules}, info, device)
    return model.to(device), drop_ins


def _load_resident(
    model: nn.Module, path: Path, renamed: dict[str, str], info: StoreInfo, device: torch.device
) -> None:
    state, codes, shared = {}, {}, False
    try:
        for key, tensor in read_resident(path):
            name = next((new + key.removeprefix(old) for old, new in renamed.items() if key.startswith(old)), key)
            module, _, part = name.rpartition(".")
            if info.resident_format == "native" or part not in ("q", "sz"):
                state[name] = tensor.to(device)
                continue
            codes.setdefault(module, {})[part] = tensor
            if len(codes[module]) == 2:
                shared = shared or module in tied_modules(model).values()
                _place_codes(model, module, codes.pop(module), info.resident_packing, device)
        state |= {f"{module}.{part}": tensor for module, parts in codes.items() for part, tensor in parts.items()}
        result = model.load_state_dict(state, strict=False, assign=True)
    except (RuntimeError, AttributeError, LookupError) as error:  # the first lists every wrong tensor, a line each
        reason = str(error).strip().splitlines()[-1].strip()
        raise StoreError(f"{path} does not match the model ({reason}); prepare the model again") from error
    if not shared:
        model.tie_weights()
    missing = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if missing or result.unexpected_keys:
        raise StoreError(f"{path} does not match the model (missing: {', '.join(missing[:3]) or 'none'}; unknown: "
                         f"{', '.join(result.unexpected_keys[:3]) or 'none'}); prepare the model again")  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _place_codes(
    model: nn.Module, path: str, parts: dict[str, torch.Tensor], packing: str, device: torch.device
) -> None:
    """Put the codes `q` and `sz` of the weight at `path` into the model, packed anew in place where `device` needs it."""
    module = model.get_submodule(path)
    stored, form = int4_format(module, packing), int4_format(module, machine_packing(device))
    wanted, got = form.tensors(), {f".{name}": (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()}
    if got != wanted:
        raise LookupError(f"the codes of {path} are {got}, the model needs {wanted}")
    q = int4.repack(parts["q"], stored.packing, form.packing)
    replace_module(model, path, form, q.to(device), parts["sz"].to(device))
