"""The student path runs a whole conversation in one forward and routes every token as decoding in Edge0 mode would.

All positions of a layer are computed at once, which is possible because the forecast for a layer at position t needs only the
layer before it at position t - 1. Positions of a prompt, and the first decoded one, keep the model's own routing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, one_hot

from engine.forecast.law import RoutingLaw
from engine.model.router import RouterSeam, Routing, as_routing, router_result


class TrainedHead(nn.Module):
    """A head in float32 with gradients; see engine/forecast/heads.py for the maths."""

    def __init__(self, fc1: Tensor, fc2: Tensor, linear_init: Tensor) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Parameter(fc1.float().clone()), nn.Parameter(fc2.float().clone())
        self.linear_init = nn.Parameter(linear_init.float().clone())

    @staticmethod
    def start(gate: Tensor, inner: int, generator: torch.Generator) -> TrainedHead:
        """A new head whose linear term is the consumer's gate [E, H] on the hidden part, and nothing else."""
        experts, hidden = gate.shape
        wide = hidden + 2 * experts
        fc1 = torch.randn(inner, wide, generator=generator) * hidden**-0.5
        linear_init = torch.cat([gate.float(), torch.zeros(experts, 2 * experts)], 1)
        return TrainedHead(fc1, torch.zeros(experts, inner), linear_init)

    def forward(self, features: Tensor) -> Tensor:
        """features [..., H + 2E] -> logits [..., E]."""
        return linear(features, self.linear_init) + linear(gelu(linear(features, self.fc1)), self.fc2)

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


@dataclass
class Turns:
    """decoded [B, T] bool: positions whose token was fed by decoding, not by a prefill."""

    decoded: Tensor

    @property
    def followed(self) -> Tensor:
        """Positions [B, T] whose predecessor was decoded too: the heads route these, and only these know a previous
        token's experts."""
        return self.decoded & shift(self.decoded)

    @staticmethod
    def of_targets(targets: list[Tensor], length: int) -> Turns:
        """targets: for every chat the positions that predict a reply token. The first of a reply is the end of a prompt,
        and the last reply token is not fed by decoding."""
        predicts = torch.zeros(len(targets), length, dtype=torch.bool)
        for row, positions in enumerate(targets):
            predicts[row, positions] = True
        return Turns(predicts & shift(predicts))


def shift(values: Tensor) -> Tensor:
    """values [B, T, ...] one position later, zeros first."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)


def features(m: Tensor, ran: Tensor, turns: Turns, experts: int) -> Tensor:
    """m [B, T, H] and the experts that ran [B, T, k] -> what a head sees at each position [B, T, H + 2E]."""
    current = one_hot(ran, experts + 1)[..., :experts].sum(-2).to(m.dtype)  # index `experts` means no expert
    previous = shift(current) * turns.followed[..., None]
    return torch.cat([m, current, previous], -1)


class StudentPath(threading.local):
    """Shared by the seams of one model; every thread has its own forward under way. heads: owner among the MoE layers ->
    head. record: of the positions that heads routed, (layer, what the head said [n, E], what the layer's own router says
    [n, E], and would choose [n, k]).
    """

    def __init__(self, heads: dict[int, nn.Module], consumers: set[int], law: RoutingLaw, experts: int) -> None:
        self.heads, self.consumers, self.law, self.experts = heads, consumers, law, experts
        self.turns: Turns | None = None
        self.record: list[tuple[int, Tensor, Tensor, Tensor]] | None = None
        self._forecast: dict[int, Tensor] = {}  # consumer -> logits [B, T, E], at the position they are for

    def begin(self, turns: Turns, record: bool) -> None:
        """A forward of conversations with these turns follows."""
        self.turns, self.record, self._forecast = turns, [] if record else None, {}

    def route(self, layer: int, hidden: Tensor, own: Routing) -> Routing:
        """Routing of every position [B * T]: the forecast's where there is one, else the router's `own`."""
        shape = self.turns.decoded.shape
        routing = own
        if layer in self._forecast:
            logits = self._forecast.pop(layer).flatten(0, 1)
            ids, weights = self.law.select(logits)
            routed = self.turns.followed.flatten()
            if self.record is not None:
                self.record.append((layer, logits[routed], own.logits[routed].float(), own.ids[routed]))
            routing = Routing(
                torch.where(routed[:, None], logits, own.logits.float()),
                torch.where(routed[:, None], ids, own.ids),
                torch.where(routed[:, None], weights, own.weights.float()),
            )
        head = self.heads.get(layer)
        if head is not None and layer + 1 in self.consumers:
            m, ran = hidden.reshape(*shape, -1).float(), routing.ids.reshape(*shape, -1)
            self._forecast[layer + 1] = shift(head(features(m, ran, self.turns, self.experts)))
        return routing


class PathSeam(RouterSeam):
    """Stands where a router stood and routes by a StudentPath."""

    def __init__(self, inner: nn.Module, layer: int, path: StudentPath) -> None:
        nn.Module.__init__(self)
        self.inner, self.layer, self.path = inner, layer, path

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        result = self.inner(hidden_states, *args, **kwargs)
        return router_result(result, self.path.route(self.layer, hidden_states, as_routing(result)))
