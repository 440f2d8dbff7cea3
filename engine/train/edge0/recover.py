"""Recovery trains what is added, never the model: LoRA pairs and heads, end to end on the path that Edge0 mode will take.

The student is the model as the store holds it (its experts' dequantised int4 weights), routed by its heads where decoding would
be; the loss is KL(teacher ‖ student) at the reply tokens, plus a little of the heads' own loss, so that the forecast stays
one. All weights are held in float32, which bounds the models this is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.model.loader import load_model
from engine.model.lora import Lora
from engine.model.resident import Int4Matrix
from engine.model.router import install
from engine.model.skeleton import build_skeleton, find_experts, find_router, load_config, parent_of
from engine.store.layout import StoreInfo
from engine.train.chats import Batch, Chat
from engine.train.descent import DescentSettings, descend
from engine.train.edge0.fit import agreement, head_loss, soft_target
from engine.train.edge0.path import PathSeam, StudentPath, TrainedHead, Turns
from engine.train.loss import top_kl


@dataclass(frozen=True)
class RecoverySettings:
    """rank: r of the LoRA, whose side path is scaled by 2, as alpha = 2 r. head_weight: of the heads' own loss."""

    rank: int = 16
    lora_lr: float = 1e-3
    heads_lr: float = 5e-4
    head_weight: float = 0.05
    descent: DescentSettings = field(default_factory=DescentSettings)


SCALE = 2.0


class TrainedLora(nn.Module):
    """A frozen linear with a trained side path, zero at the start."""

    def __init__(self, inner: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(rank, inner.in_features, generator=generator) * inner.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + SCALE * linear(linear(x, self.a), self.b)


def load_dense(directory: Path, info: StoreInfo) -> nn.Module:
    """The transformers model that a store stands for, all of it in float32 memory."""
    model, _ = load_model(directory, info, torch.device("cpu"))
    fresh = find_experts(build_skeleton(load_config(directory), torch.float32))
    with (directory / info.experts_file).open("rb") as file, torch.no_grad():
        for path in info.layers:
            parent, name = parent_of(model, path)
            module = fresh[path].to_empty(device="cpu", recurse=False)
            for child, inner in getattr(parent, name).inner.named_children():
                setattr(module, child, inner)  # what the experts module has beside its weights
            for expert in range(info.experts):
                record = torch.frombuffer(bytearray(file.read(info.layout.record_bytes)), dtype=torch.uint8)
                _fill(module, expert, info, record)
            setattr(parent, name, module)
    for path, module in list(model.named_modules()):
        if isinstance(module, Int4Matrix):
            parent, name = parent_of(model, path)
            setattr(parent, name, module.dense())
    return model.float().eval().requires_grad_(False)


def _fill(module: nn.Module, expert: int, info: StoreInfo, record: Tensor) -> None:
    """Decode one expert's record into its rows of the fused parameters."""
    views = info.layout.views(record)
    for name, form in info.layout.formats.items():
        weight = form.decode({suffix: views[name + suffix] for suffix in form.tensors()})
        getattr(module, f"{name}_proj").data[expert] = weight.t() if module.is_transposed else weight
        if f"{name}_bias" in views:
            getattr(module, f"{name}_proj_bias").data[expert] = views[f"{name}_bias"].float()


class Student:
    """The dense model with seams and side paths in place. `heads`: owner among the MoE layers -> head."""

    def __init__(
        self, directory: Path, info: StoreInfo, heads: dict[int, TrainedHead], law, settings: RecoverySettings
    ):
        self.model, self.settings = load_dense(directory, info), settings
        self.path = StudentPath(heads, {owner + 1 for owner in heads}, law, info.experts)
        self.heads = nn.ModuleDict({str(owner): head for owner, head in heads.items()})
        paths = list(find_experts(self.model))
        self.lora = self._add_lora(settings)
        install(self.model, [find_router(self.model, path) for path in paths], self.path, PathSeam)

    def _add_lora(self, settings: RecoverySettings) -> dict[str, TrainedLora]:
        """Side paths beside every resident linear but the output head; single-row gates are not worth one."""
        generator = torch.Generator().manual_seed(settings.descent.seed)
        head, added = self.model.get_output_embeddings(), {}
        for name, module in list(self.model.named_modules()):
            if type(module) is not nn.Linear or module is head or module.out_features <= settings.rank:
                continue
            parent, attribute = parent_of(self.model, name)
            added[name] = TrainedLora(module, settings.rank, generator)
            setattr(parent, attribute, added[name])
        return added

    def hidden(self, chats: list[Chat], record: bool) -> Tensor:
        """Final hidden states [n, H] at the targets of a batch, routed as decoding would be."""
        return self._hidden(Batch.of(chats), chats, record)

    def _hidden(self, batch: Batch, chats: list[Chat], record: bool) -> Tensor:
        self.path.begin(Turns.of_targets([chat.targets for chat in chats], batch.ids.shape[1]), record)
        output = self.model.base_model(input_ids=batch.ids, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)[batch.positions]

    def loss(self, chats: list[Chat]) -> tuple[Tensor, float]:
        """(the loss of a batch, its KL)."""
        batch = Batch.of(chats)
        hidden = self._hidden(batch, chats, record=True)
        kl = top_kl(hidden, self.model.get_output_embeddings().weight, batch.top_ids, batch.top_log_probs)
        law = self.path.law
        heads = [head_loss(said, soft_target(own, ids, law).detach(), law) for _, said, own, ids in self.path.record]
        return kl + self.settings.head_weight * sum(heads) / max(1, len(heads)), kl.item()

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        lora = [p for module in self.lora.values() for p in (module.a, module.b)]
        return [(lora, self.settings.lora_lr), (list(self.heads.parameters()), self.settings.heads_lr)]

    def changed(self) -> None:
        """Nothing is derived from the parameters."""

    def trained(self) -> dict[str, Tensor]:
        pairs = {f"lora.{name}.{half}": getattr(m, half) for name, m in self.lora.items() for half in "ab"}
        return {**pairs, **{f"heads.{name}": p for name, p in self.heads.named_parameters()}}

    @torch.no_grad()
    def load_trained(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.trained().items():
            parameter.copy_(tensors[name])

    def as_lora(self, metadata: dict[str, str]) -> Lora:
        return Lora({name: (m.a.detach(), m.b.detach()) for name, m in self.lora.items()}, SCALE, metadata)

    @torch.inference_mode()
    def score(self, chats: list[Chat]) -> dict:
        """Mean KL to the teacher over the reply tokens of `chats`, and each layer's agreement with its own router."""
        total, count, kept = 0.0, 0, {}
        for chat in chats:
            _, kl = self.loss([chat])
            total, count = total + kl * len(chat.targets), count + len(chat.targets)
            for layer, said, own, ids in self.path.record:
                found = agreement(said, soft_target(own, ids, self.path.law), ids, self.path.law)
                kept.setdefault(layer, []).append(found)
        means = {layer: {k: sum(f[k] for f in found) / len(found) for k in found[0]} for layer, found in kept.items()}
        return {"kl": total / count, "tokens": count, "agreement": means}


def recover(
    student: Student,
    chats: list[Chat],
    settings: RecoverySettings,
    checkpoint: Path,
    report: Callable[[dict], None],
) -> None:
    """One pass over `chats`, in place; see `descend` for the rest."""
    descend(student, chats, settings.descent, checkpoint, report)
