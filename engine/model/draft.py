"""While a model drafts, its experts are the draft's, all resident; every other tensor, and the KV prefix, are the target's.

Where experts are so small that the calls cost more than the arithmetic, all experts of a layer are merged into one: the first
projections stacked, the routing weights laid over the activations (zero for experts that are not routed to), the second
projections side by side. Nothing hangs on the draft's rounding: what it proposes is verified.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels import int4
from engine.kernels.expert import ExpertKernel
from engine.kernels.formats import MatrixFormat
from engine.memory.arena import SlotArena
from engine.model.experts import StreamedExperts
from engine.store.draft import DraftFile
from engine.store.layout import RecordLayout, StoreInfo
from engine.store.verify import read_records

_CALL_BYTES = 2**18  # reading this many bytes of weights takes about as long as the calls of one more expert
Activate = Callable[[torch.Tensor], torch.Tensor]


def begin_drafting(targets: list[StreamedExperts], draft: Draft) -> None:
    """From now on the model computes with the experts of `draft`."""
    for target, layer in zip(targets, draft.layers, strict=True):
        target.draft = layer


def end_drafting(targets: list[StreamedExperts]) -> None:
    """From now on the model computes with its own experts."""
    for target in targets:
        target.draft = None


class RecordExperts:
    """Experts of one layer, computed from their records one by one."""

    def __init__(self, kernel: ExpertKernel, first: int, experts: int) -> None:
        self.kernel, self.first, self.experts = kernel, first, experts

    def __call__(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [n, H], index [n, k] int, weights [n, k] -> [n, H]."""
        rows = []
        for x, ids, w in zip(hidden_states.split(1), index.tolist(), weights, strict=True):
            chosen = [i for i, expert in enumerate(ids) if expert < self.experts]
            if not chosen:
                rows.append(torch.zeros_like(x[0]))
                continue
            out = self.kernel.for_one_token([self.first + ids[i] for i in chosen], x)
            rows.append((out * w[chosen].unsqueeze(-1)).sum(dim=0))
        return torch.stack(rows).to(hidden_states.dtype)


class MergedExperts:
    """Experts of one layer as one wide one. first [E N, H], second [H, E I], encoded; biases [E, ...] or None."""

    def __init__(self, experts: int, first, second, biases: tuple, forms: tuple, activate: Activate) -> None:
        self.experts, self.activate = experts, activate
        self.first, self.second, self.biases = first, second, biases
        device = first[0].device
        self._first, self._second = (form.matmul(device) for form in forms)

    def __call__(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [n, H], index [n, k] int, weights [n, k] -> [n, H]."""
        n = hidden_states.shape[0]
        share = hidden_states.new_zeros(n, self.experts + 1)  # the last column takes transformers' "no expert"
        share.scatter_(1, index.clamp_max(self.experts), weights.to(share.dtype))
        share = share[:, : self.experts]
        hidden = self._first(hidden_states, *self.first).view(n * self.experts, -1)
        if self.biases[0] is not None:
            hidden = hidden + self.biases[0].to(hidden.dtype).repeat(n, 1)
        hidden = self.activate(hidden).view(n, self.experts, -1) * share.unsqueeze(-1)
        out = self._second(hidden.view(n, -1), *self.second)
        return out if self.biases[1] is None else out + share @ self.biases[1].to(out.dtype)


class Draft:
    """The draft experts of a whole model, a layer each. bytes: what they take on the device."""

    def __init__(
        self, file: DraftFile, layers: list[RecordExperts] | list[MergedExperts], size: int, arena: SlotArena | None = None
    ) -> None:
        self.file, self.layers, self.bytes, self._arena = file, layers, size, arena

    def close(self) -> None:
        """Give the memory back."""
        self.layers = []
        if self._arena is not None:
            self._arena.close()


def load_draft(file: DraftFile, info: StoreInfo, activate: Activate, finish, device: torch.device) -> Draft:
    """Read a draft into the memory of `device`, packed for it.

    activate, finish: what the model does between and after the projections of an expert, as for ExpertKernel.
    """
    layers, experts, packing = len(info.layers), info.experts, int4.loading_packing(device)
    records = (torch.frombuffer(bytearray(record), dtype=torch.uint8)
               for record in read_records(file.path, file.layout.record_bytes))  # fmt: skip
    if finish is None and experts * file.layout.record_bytes <= info.top_k * _CALL_BYTES:
        return _merged(records, packing, layers, experts, activate, file, device)
    wanted = _packed(file.layout, packing)
    arena = SlotArena(layers * experts, wanted.record_bytes, device)
    for slot, record in enumerate(records):
        arena.record(slot).copy_(record)
        _repack(arena.record(slot), file.layout, wanted)
    kernel = ExpertKernel(wanted, arena, activate, finish)
    return Draft(file, [RecordExperts(kernel, layer * experts, experts) for layer in range(layers)], arena.bytes, arena)


def _packed(layout: RecordLayout, packing: str) -> RecordLayout:
    formats = {name: MatrixFormat.choose(form.kind, form.shape, packing) for name, form in layout.formats.items()}
    return RecordLayout(formats, layout.fields, layout.record_bytes)


def _repack(record: torch.Tensor, old: RecordLayout, new: RecordLayout) -> None:
    """Turn a record, where it lies, from the packings of `old` to those of `new`."""
    views = old.views(record)
    for name, form in old.formats.items():
        if form != new.formats[name]:
            codes = views[f"{name}.q"]
            codes.copy_(new.formats[name].encode_codes(form.codes(codes), views[f"{name}.sz"])[".q"])


def _merged(records, packing: str, layers: int, experts: int, activate: Activate, file: DraftFile, device) -> Draft:
    layout = file.layout
    one, two = layout.formats
    first, second = layout.formats[one], layout.formats[two]
    wide = MatrixFormat.choose(first.kind, (experts * first.shape[0], first.shape[1]), packing)
    side = MatrixFormat.choose(second.kind, (second.shape[0], experts * second.shape[1]), packing)
    side = MatrixFormat(side.kind, side.shape, second.group, int4.choose_packing(side.shape, second.group, packing))
    made, size = [], 0
    for _ in range(layers):
        parts = [layout.views(next(records).to(device)) for _ in range(experts)]
        up = wide.encode_codes(torch.cat([first.codes(p[f"{one}.q"]) for p in parts]),
                               torch.cat([p[f"{one}.sz"] for p in parts], dim=1))  # fmt: skip
        down = side.encode_codes(torch.cat([second.codes(p[f"{two}.q"]) for p in parts], dim=1),
                                 torch.cat([p[f"{two}.sz"] for p in parts]))  # fmt: skip
        biases = [torch.stack([p[f"{m}_bias"] for p in parts]) if f"{m}_bias" in parts[0] else None for m in (one, two)]
        tensors = [list(encoded.values()) for encoded in (up, down)]
        size += sum(t.numel() * t.element_size() for t in [*tensors[0], *tensors[1], *biases] if t is not None)
        made.append(MergedExperts(experts, *tensors, tuple(biases), (wide, side), activate))
    return Draft(file, made, size)
