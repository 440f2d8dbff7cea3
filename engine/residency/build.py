"""Which tiers a configuration gets: slots in host memory read from the store; on CUDA, or over an emulated link, slots
copied from those."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import EngineConfig, parse_size
from engine.kernels.expert import ExpertKernel
from engine.memory.arena import SlotArena
from engine.memory.plan import Plan, available_memory
from engine.model.experts import StreamedExperts
from engine.residency.copy import CopyFetcher, CudaLink, EmulatedLink, Link
from engine.residency.fetch import StoreFetcher
from engine.residency.misses import HostExperts
from engine.residency.policy import Lfru
from engine.residency.tier import Tier
from engine.store.layout import StoreInfo
from engine.store.reader import RecordReader

_HALF_LIFE_TOKENS = 64  # an expert's use counts half as much this many tokens later
_FORESEEN = 0.5  # of the slots, for experts that are forecast: the others are kept by how often they are used
_HOST_SHARE = 0.7  # of the free host memory, for the host tier below a device


def build_tier(
    path: Path, info: StoreInfo, plan: Plan, config: EngineConfig, experts: StreamedExperts, device: torch.device
) -> tuple[Tier, ExpertKernel, HostExperts | None]:
    """The tier experts are computed from, the kernel that computes from its slots, and who computes what is missing there
    from the tier below, where that may be.

    experts: one of the model's, for what it does between and after the projections.
    """
    if device.type == "cuda":
        host = host_tier(path, info, _host_slots(info, config), config, pinned=True)
        tier = device_tier(host, plan.slots, device, CudaLink(device), _horizon(info, plan.slots))
    elif config.emulated_link is not None:
        host = host_tier(path, info, len(info.layers) * info.experts, config)
        host.prefetch(range(host.keys), deadline=2**62)
        host.settle()
        link = EmulatedLink(parse_size(config.emulated_link))
        tier = device_tier(host, plan.slots, device, link, _horizon(info, plan.slots))
    else:
        tier = host_tier(path, info, plan.slots, config)
    if tier.all_resident:
        tier.prefetch(range(tier.keys), deadline=2**62)
    kernel = ExpertKernel(info.layout, tier.arena, *experts.functions())
    # Over an emulated link the processor is the device as well: it would be the faster place for everything.
    device_alone = config.misses == "copy" or (config.misses == "auto" and device.type != "cuda")
    if device_alone or tier.all_resident or not isinstance(tier.fetcher, CopyFetcher):
        return tier, kernel, None
    below = ExpertKernel(info.layout, tier.fetcher.host.arena, kernel.activate, None)
    return tier, kernel, HostExperts(tier, below, kernel.finish, info.hidden, config.misses == "cpu")


def host_tier(path: Path, info: StoreInfo, slots: int, config: EngineConfig, pinned: bool = False) -> Tier:
    """`slots` slots in host memory, filled from the store at `path`."""
    arena = SlotArena(slots, info.layout.record_bytes, torch.device("cpu"), pinned)
    reader = RecordReader(path / info.experts_file, info.layout.record_bytes, config.page_cache)
    fetcher = StoreFetcher(reader, arena, config.read_threads)
    return Tier(len(info.layers), info.experts, arena, fetcher, _policy(len(info.layers), info.experts), _horizon(info, slots))


def device_tier(host: Tier, slots: int, device: torch.device, link: Link, horizon: int = 2**62) -> Tier:
    """`slots` slots on `device`, filled over `link` from the slots of `host`, which it owns from now on."""
    arena = SlotArena(slots, host.arena.record_bytes, device)
    fetcher = CopyFetcher(host, arena, link)
    return Tier(host.layers, host.experts, arena, fetcher, _policy(host.layers, host.experts), horizon)


def _horizon(info: StoreInfo, slots: int) -> int:
    """Steps ahead for which forecasts may evict: as many layers' experts as the slots set aside for them hold."""
    return max(2, int(_FORESEEN * slots / info.top_k))


def _policy(layers: int, experts: int) -> Lfru:
    return Lfru(layers, experts, _HALF_LIFE_TOKENS * layers)


def _host_slots(info: StoreInfo, config: EngineConfig) -> int:
    """Host slots below a device tier: all experts where they fit in the free memory."""
    total = len(info.layers) * info.experts
    if config.host_memory == "auto":
        room = int(available_memory(torch.device("cpu")) * _HOST_SHARE)
    else:
        room = parse_size(config.host_memory, whole=info.expert_bytes_total, name="host memory")
    return max(2 * info.top_k, min(total, room // info.layout.record_bytes))
