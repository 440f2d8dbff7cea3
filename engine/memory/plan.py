"""The plan says what a configuration will use, by kind, before anything is loaded, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.config import EngineConfig, Mode, format_size, parse_size
from engine.errors import PlanError
from engine.store.draft import draft_bytes
from engine.store.layout import StoreInfo

_SCRATCH_LIMIT = 96 * 2**20  # what one prefill chunk's expert activations may take
_CGROUP_FILES = (  # a limit and what is used of it, in cgroup versions 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_MARGIN = 256 * 2**20  # left free beside everything planned: allocator slack, the app, the reader's buffers


@dataclass(frozen=True)
class Plan:
    """Bytes by kind for one configuration. total_bytes is their sum; fits says whether it leaves the margin free.

    expert_budget_bytes: what experts may take, draft_bytes of it for a draft's; slots: equal record-sized slots that fit in the
    rest. min_expert_bytes: one layer's top-k and the draft, below which nothing can run; max_expert_bytes: every expert
    resident.
    """

    model: str
    device: str
    context: int
    resident_bytes: int
    expert_bytes_total: int
    expert_budget_bytes: int
    slots: int
    min_expert_bytes: int
    max_expert_bytes: int
    kv_bytes: int
    scratch_bytes: int
    adapter_bytes: int
    draft_bytes: int
    total_bytes: int
    available_bytes: int
    margin_bytes: int
    fits: bool
    record_bytes: int
    layers: int
    experts: int
    top_k: int

    def require_fit(self) -> Plan:
        """This plan, or PlanError with the numbers and the nearest setting that fits."""
        least = format_size(self.min_expert_bytes)
        if self.expert_budget_bytes < self.min_expert_bytes:
            raise PlanError(
                f"expert memory {format_size(self.expert_budget_bytes)} is below the minimum for {self.model}: one layer's "
                f"{self.top_k} experts {'and the draft ' if self.draft_bytes else ''}need {least} ({self.min_expert_bytes} "
                "bytes); set it to at least that"
            )
        if self.fits:
            return self
        others = self.total_bytes - self.expert_budget_bytes
        room = self.available_bytes - self.margin_bytes - others
        need = f"{self.model} needs {format_size(self.total_bytes)} ({self.describe()}), {format_size(self.available_bytes)} "
        need += f"are available and {format_size(self.margin_bytes)} stay free; "
        if room >= self.min_expert_bytes:
            raise PlanError(need + f"lower the expert memory to {room // 2**20}MiB")
        per_token = self.kv_bytes / self.context
        context = int((self.available_bytes - self.margin_bytes - others + self.kv_bytes - self.min_expert_bytes) / per_token) \
            if per_token else 0  # fmt: skip
        if context >= 256:
            raise PlanError(
                need + f"lower the context to {context // 256 * 256} tokens and the expert memory to {least}"
            )
        raise PlanError(need + "choose a smaller model, int4 resident weights, or a machine with more memory")

    def describe(self) -> str:
        drafts = f" of which the draft {format_size(self.draft_bytes)}" if self.draft_bytes else ""
        return (f"resident {format_size(self.resident_bytes)}, experts {format_size(self.expert_budget_bytes)}{drafts}, "
                f"KV {format_size(self.kv_bytes)}, scratch {format_size(self.scratch_bytes)}")  # fmt: skip


def make_plan(
    name: str,
    info: StoreInfo,
    config: EngineConfig,
    vocabulary: int,
    adapters: int,
    available: int | None = None,
    parked: bool = False,
) -> Plan:
    """The plan of `config` for a store. available: bytes free for us, measured when None. Never raises for size.

    vocabulary: length of a logits row; adapters: bytes of heads and LoRA that `config` asks for. parked: specter mode
    without its draft. Raises ConfigError for a malformed expert memory.
    """
    device = resolve_device(config.device)
    available = available_memory(device) if available is None else available
    draft = draft_bytes(info, config.draft_bits) if config.mode is Mode.SPECTER and not parked else 0
    total = info.expert_bytes_total + draft
    kv = (
        3 * info.kv_bytes_fixed + info.kv_bytes_per_token * config.context
    )  # recurrent states are also kept in two copies
    scratch = scratch_bytes(info, prefill_chunk(info), vocabulary)
    resident = info.resident_bytes
    least = info.top_k * info.layout.record_bytes + draft
    room = max(0, available - _MARGIN - resident - kv - scratch - adapters)
    if config.expert_memory == "auto":
        budget = max(min(room, total), min(least, total))
    else:
        budget = min(parse_size(config.expert_memory, whole=info.expert_bytes_total, name="expert memory"), total)
    used = resident + budget + kv + scratch + adapters
    return Plan(
        model=name,
        device=str(device),
        context=config.context,
        resident_bytes=resident,
        expert_bytes_total=info.expert_bytes_total,
        expert_budget_bytes=budget,
        slots=max(0, budget - draft) // info.layout.record_bytes,
        min_expert_bytes=least,
        max_expert_bytes=total,
        kv_bytes=kv,
        scratch_bytes=scratch,
        adapter_bytes=adapters,
        draft_bytes=draft,
        total_bytes=used,
        available_bytes=available,
        margin_bytes=_MARGIN,
        fits=used + _MARGIN <= available and budget >= least,
        record_bytes=info.layout.record_bytes,
        layers=len(info.layers),
        experts=info.experts,
        top_k=info.top_k,
    )


def prefill_chunk(info: StoreInfo) -> int:
    """Tokens prefilled in one forward: a power of two between 128 and 1024 that keeps the scratch small.

    A function of the model alone: chunk borders decide how sums are rounded, so they must not depend on the budget.
    """
    per_token = info.top_k * info.hidden * 6
    chunk = 1024
    while chunk > 128 and chunk * per_token > _SCRATCH_LIMIT:
        chunk //= 2
    return chunk


def scratch_bytes(info: StoreInfo, tokens: int, vocabulary: int) -> int:
    """Upper estimate of a forward's temporary memory: expert outputs and their sum, activations, one row of logits."""
    inner = max(f.shape[0] for f in info.layout.formats.values())
    expert_outputs = tokens * info.top_k * info.hidden * 6  # kept apart in the model's dtype, then weighted in fp32
    activations = tokens * (8 * info.hidden + 3 * inner) * 4
    widest = max(f.shape[0] * f.shape[1] for f in info.layout.formats.values()) * 4  # one matrix dequantised to fp32
    return expert_outputs + activations + widest + vocabulary * 8


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises PlanError when CUDA is asked for and missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("device cuda: this machine has no CUDA device that torch can use; choose --device cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def available_memory(device: torch.device) -> int:
    """Bytes free for new allocations on `device`: on the host what the system has and a cgroup limit allows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [psutil.virtual_memory().available]
    for limit, usage in _CGROUP_FILES:
        most, used = _number(Path(limit)), _number(Path(usage))
        if most is not None and used is not None and most < 2**60:
            limits.append(max(0, most - used))
    return min(limits)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # no cgroup of this version here
    return int(text) if text.isdigit() else None
