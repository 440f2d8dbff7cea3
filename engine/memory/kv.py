"""KV memory is measured on transformers' own cache: on the meta device before loading, on the real one while
running."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config

from engine.errors import UnsupportedModelError
from engine.model.skeleton import cache_argument, find_experts, parent_of


def cache_bytes(cache) -> int:
    """Bytes of all tensors a transformers Cache holds."""
    return sum(layer_bytes(layer) for layer in cache.layers)


def layer_bytes(layer) -> int:
    """Bytes of all tensors of one layer of a transformers Cache."""
    return sum(t.numel() * t.element_size() for t in _tensors(vars(layer)))


def _tensors(values: dict):
    for value in values.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def kv_bytes(model: nn.Module) -> tuple[int, int]:
    """(bytes a token adds, bytes that do not grow) of the cache of a model on the meta device.

    Runs the skeleton on the meta device for one and for two tokens, experts left out. Sliding windows are counted as if
    they grew with the context: an upper bound. Raises UnsupportedModelError for a model with a cache of its own kind.
    """
    from transformers import DynamicCache

    probe = copy.deepcopy(model).to("meta")
    for path in find_experts(probe):
        parent, name = parent_of(probe, path)
        setattr(parent, name, _NoExperts())
    sizes = []
    for tokens in (1, 2):
        cache = DynamicCache(config=probe.config)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        try:
            with torch.no_grad(), fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # else they have no shape
                probe(input_ids=ids, use_cache=True, **{cache_argument(probe): cache})
        except Exception as error:  # noqa: BLE001 - whatever the model's own code raises
            raise UnsupportedModelError(
                f"'{model.config.model_type}' does not run with transformers' DynamicCache: {str(error).splitlines()[0]}"
            ) from error
        sizes.append(cache_bytes(cache))
    growth = sizes[1] - sizes[0]
    return growth, sizes[0] - growth


class _NoExperts(nn.Module):
    """Stands for experts where only shapes matter."""

    def forward(self, hidden_states: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)
