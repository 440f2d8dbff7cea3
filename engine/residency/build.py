"""Which tiers a configuration gets: slots in host memory read from the store; on CUDA, device slots copied from those."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from engine.config import EngineConfig
from engine.kernels.expert import ExpertKernel
from engine.memory.arena import SlotArena
from engine.memory.plan import Plan
from engine.residency.fetch import StoreFetcher
from engine.residency.policy import Lfru
from engine.residency.tier import Tier
from engine.store.layout import EXPERTS_FILE, StoreInfo
from engine.store.reader import RecordReader

_HALF_LIFE_TOKENS = 64  # an expert's use counts half as much this many tokens later


def build_tier(
    path: Path, info: StoreInfo, plan: Plan, config: EngineConfig, inner: nn.Module, device: torch.device
) -> tuple[Tier, ExpertKernel]:
    """The tier experts are computed from, and the kernel that computes from its slots.

    inner: an experts module of the model, for what it does between and after the projections.
    """
    tier = host_tier(path, info, plan.slots, config)
    activate = inner._apply_gate if inner.has_gate else inner.act_fn
    finish = inner.post_expert_norm if inner.has_post_expert_norm else None
    if tier.all_resident:
        tier.prefetch(range(tier.keys), deadline=2**62)
    return tier, ExpertKernel(info.layout, tier.arena, activate, finish)


def host_tier(path: Path, info: StoreInfo, slots: int, config: EngineConfig, pinned: bool = False) -> Tier:
    """`slots` slots in host memory, filled from the store at `path`."""
    arena = SlotArena(slots, info.layout.record_bytes, torch.device("cpu"), pinned)
    reader = RecordReader(path / EXPERTS_FILE, info.layout.record_bytes, config.page_cache)
    fetcher = StoreFetcher(reader, arena, config.read_threads)
    layers = len(info.layers)
    return Tier(layers, info.experts, arena, fetcher, Lfru(layers * info.experts, _HALF_LIFE_TOKENS * layers))
