"""In Edge0 mode the forecast is the routing: what a head staged is exactly what its consumer runs, so nothing is dropped.

The head of layer N runs inside the forward of token t, as soon as layer N's routing is known, and routes the next layer at
token t + 1; the reads it asks for have almost a whole token's computation to hide behind. Prefill is never routed by heads,
and neither is the first decoded token, unless the heads were trained to be fed by the end of the prompt. Later on a consumer
without a forecast is an error. Nothing survives from one request to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ForecastError, StoreError
from engine.forecast.gate import GateLookahead
from engine.forecast.heads import Head, make_heads, read_heads
from engine.forecast.law import RoutingLaw
from engine.model.router import Routing, routed_ids
from engine.residency.tier import Tier
from engine.store.adapter import HEADS, check_model, find_adapter
from engine.store.layout import StoreInfo

_AGREEMENT_EVERY = 8  # tokens between two looks at what the consumers' own routers would have chosen


@dataclass(frozen=True)
class Prerouter:
    """Heads by the index of their owner among the MoE layers, and the MoE layers that they route.

    fed_by_prefill: the heads run at the last position of the prompt too, so that the first decoded token is forecast.
    """

    heads: dict[int, Head]
    consumers: frozenset[int]
    file: Path
    fed_by_prefill: bool = False

    @property
    def bytes(self) -> int:
        return sum(head.bytes for head in self.heads.values())


def decoder_layer(path: str) -> int:
    """Number of the decoder layer that the module path of an experts module lies in."""
    return next(int(part) for part in path.split(".") if part.isdigit())


def load_prerouter(directory: Path, info: StoreInfo, device: torch.device) -> Prerouter:
    """The heads that lie in a store. Raises StoreError when there are none or they are another model's."""
    path = find_adapter(directory, HEADS)
    if path is None:
        raise StoreError(f"{directory} holds no prerouter heads: train them with `python -m engine train {directory}`")
    file = read_heads(path)
    check_model(path, file.metadata, info)
    layer_of = {decoder_layer(name): layer for layer, name in enumerate(info.layers)}
    for owner, parts in file.tensors.items():
        inner, wide = parts["fc1"].shape
        wanted = {"fc1": (inner, info.hidden + 2 * info.experts), "fc2": (info.experts, inner),
                  "linear_init": (info.experts, info.hidden + 2 * info.experts)}  # fmt: skip
        for part, shape in wanted.items():
            if tuple(parts[part].shape) != shape:
                raise StoreError(f"{path}: layers.{owner}.{part}.weight has shape {tuple(parts[part].shape)}, "
                                 f"this model needs {shape}: the heads are another model's")  # fmt: skip
        if owner not in layer_of or owner + 1 not in layer_of:
            raise StoreError(f"{path}: layer {owner} has no MoE layer after it: the heads are another model's")
    owners = set(file.tensors)
    consuming = {owner + 1 for owner in owners}
    published = "consumers" not in file.metadata  # as Edge0's own heads were trained: each of its models by a rule of its own
    if not published:
        consuming &= {int(n) for n in file.metadata["consumers"].split(",")}
    elif info.model_type.startswith("qwen3_5_moe"):
        consuming &= owners  # a layer without a head of its own keeps its router
    heads = make_heads({layer_of[n]: parts for n, parts in file.tensors.items() if n + 1 in consuming}, device)
    fed_by_prefill = published and info.model_type.startswith("bailing")
    return Prerouter(heads, frozenset(layer_of[n] for n in consuming), path, fed_by_prefill)


class PrerouterForecast(GateLookahead):
    """Routes the consumers of `prerouter` by `law` and prefetches what they will run; gate look-ahead serves the rest."""

    def __init__(self, tier: Tier, prerouter: Prerouter, law: RoutingLaw) -> None:
        super().__init__(tier)
        self.prerouter, self.law = prerouter, law
        self.fresh = 2 if prerouter.fed_by_prefill else 0  # the last position, and the experts of the one before it
        self._first = 1 if prerouter.fed_by_prefill else 2  # decode forward that has a forecast
        self.reset()

    def reset(self) -> None:
        """A request begins."""
        super().reset()
        self._forwards = 0  # decode forwards begun
        self._ready: dict[int, Routing] = {}  # for this token, made at the last one
        self._made: dict[int, Routing] = {}  # for the next token
        self._ran: dict[int, torch.Tensor] = {}  # owner -> ids [k] that ran at this token, or at the last of a prompt
        self._ran_before: dict[int, torch.Tensor] = {}
        self._agreed, self._compared = 0, 0

    def on_forward(self, decoding: bool) -> None:
        """A forward begins."""
        self._forwards = self._forwards + 1 if decoding else 0
        self._ready, self._made = self._made, {}
        self._ran_before, self._ran = self._ran, {}

    def routing(self, layer: int) -> Routing | None:
        """What routes `layer` at this token; None for its own router. Raises ForecastError for a lost forecast."""
        if layer not in self.prerouter.consumers or self._forwards < self._first:
            return None
        if layer not in self._ready:
            raise ForecastError(f"MoE layer {layer} has no forecast at decode step {self._forwards}")
        return self._ready[layer]

    def on_routed(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        super().on_routed(layer, moe_input, ids)
        if not self._forwards and not self.prerouter.fed_by_prefill:
            return
        if layer in self._ready and self._forwards % _AGREEMENT_EVERY == 2:
            self._compare(layer, moe_input, ids)
        head = self.prerouter.heads.get(layer)
        if head is None:
            return
        self._ran[layer] = ids[-1]
        before = ids[-2] if len(ids) > 1 else self._ran_before.get(layer)
        logits = head.logits(moe_input.reshape(len(ids), -1)[-1:], ids[-1], before)
        chosen, weights = self.law.select(logits)
        self._made[layer + 1] = Routing(logits, chosen, weights)
        # The next lease is this layer's; its successor's at the next token comes a round and one step after it.
        self.tier.prefetch(self.keys(layer + 1, chosen), deadline=self.tier.clock + self.tier.layers + 2)

    def _compare(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        seam = self.seams[layer]
        own = set(routed_ids(seam.inner(moe_input, *(seam.extra or ()))).flatten().tolist())
        self._agreed += len(own.intersection(ids.flatten().tolist()))
        self._compared += len(own)

    @property
    def agreement(self) -> float | None:
        """Share of the forecast experts that the consumers' own routers would have chosen too; None before a look."""
        return self._agreed / self._compared if self._compared else None
