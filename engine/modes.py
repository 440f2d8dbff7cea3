"""A mode is entered and left as a whole: before it is entered and after it is left, the model is transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from engine.config import DRAFT_BITS, EngineConfig, Mode
from engine.errors import ConfigError, OutriderError
from engine.forecast.draft import DraftRoutes, Scheduling
from engine.forecast.gate import DemandForecast, GateLookahead, TrialLookahead
from engine.forecast.law import RoutingLaw, find_law
from engine.forecast.prerouter import Prerouter, PrerouterForecast, load_prerouter
from engine.model.draft import Draft, load_draft
from engine.model.experts import StreamedExperts
from engine.model.lora import Lora, install_lora, place_lora, read_lora, remove_lora
from engine.model.router import RouterSeam, Routing, TraceSeam, install, remove
from engine.model.skeleton import find_router
from engine.residency.tier import Tier
from engine.store.adapter import HEADS, LORA, check_model, find_adapter
from engine.store.draft import DraftFile, find_draft
from engine.store.layout import StoreInfo


def adapter_bytes(directory: Path, config: EngineConfig) -> int:
    """Bytes of the heads and the LoRA in the store at `directory` that `config` asks for."""
    if config.mode is not Mode.EDGE0:
        return 0
    return sum(file.stat().st_size for file in _adapter_files(directory, config) if file is not None)


def _adapter_files(directory: Path, config: EngineConfig) -> tuple[Path | None, Path | None]:
    """Where the heads and the LoRA of edge0 mode lie; None for what there is not, or is not asked for."""
    return find_adapter(directory, HEADS), find_adapter(directory, LORA) if config.lora else None


def _written(files: tuple[Path | None, Path | None]) -> tuple:
    """Which files these are, and when they were written."""
    return tuple((file, file.stat().st_mtime_ns) for file in files if file is not None)


@dataclass(frozen=True)
class Adapters:
    """What Edge0 mode adds to a model. lora: by module paths of the model, None when it is off or there is none; written: which
    files they were read from, as of when."""

    prerouter: Prerouter
    law: RoutingLaw
    lora: Lora | None
    written: tuple

    @property
    def bytes(self) -> int:
        return self.prerouter.bytes + (self.lora.bytes if self.lora else 0)


class Modes:
    """The modes of one loaded model. `forecast` is the entered mode's, None outside of any."""

    def __init__(self, directory: Path, info: StoreInfo, model: nn.Module, experts: list[StreamedExperts]) -> None:
        self._directory, self._info, self._model, self._experts = directory, info, model, experts
        self._routers = [find_router(model, path) for path in info.layers]
        self._law: RoutingLaw | None = None
        self._adapters: Adapters | None = None  # of the entered mode
        self._draft: Draft | None = None  # stays when its mode is left for a while, until `release`
        self.forecast: DemandForecast | None = None

    @property
    def supports_gate(self) -> bool:
        """Whether every MoE layer has a router that can be asked ahead, or stood in for."""
        return None not in self._routers

    @property
    def lora(self) -> bool:
        """Whether the recovery LoRA is on."""
        return self._adapters is not None and self._adapters.lora is not None

    @property
    def adapter_bytes(self) -> int:
        """Bytes of heads and LoRA that the entered mode holds."""
        return self._adapters.bytes if self._adapters else 0

    @property
    def draft(self) -> Draft | None:
        """The draft in memory."""
        return self._draft

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft in memory."""
        return self._draft.bytes if self._draft else 0

    def drafts(self) -> tuple[int, ...]:
        """Bits of the drafts that the store holds."""
        return tuple(bits for bits in DRAFT_BITS if self.hindrance(Mode.SPECTER, bits) is None)

    def hindrance(self, mode: Mode, draft_bits: int) -> str | None:
        """Why the model cannot be run in `mode`, and what to do; None when it can."""
        try:
            if mode is Mode.SPECTER:
                if not self.supports_gate:
                    return f"{self._info.architecture} has no router to watch while drafting: use on-demand mode"
                find_draft(self._directory, self._info, draft_bits)
            if mode is not Mode.EDGE0:
                return None
            if find_adapter(self._directory, HEADS) is None:
                return (f"{self._directory.name} has no prerouter heads: train them with `python -m engine train "
                        f"{self._directory.name}`")  # fmt: skip
            self.routing_law()
        except OutriderError as error:
            return str(error)
        return None

    def load(self, config: EngineConfig, parked: bool = False) -> Adapters | DraftFile | None:
        """What the mode of `config` needs beside the model, checked; None when it needs nothing.

        parked: specter mode without its draft. Raises ConfigError or StoreError; nothing has changed then.
        """
        hindrance = self.hindrance(config.mode, config.draft_bits)
        if hindrance:
            raise ConfigError(hindrance)
        if config.mode is Mode.SPECTER and not parked:
            return find_draft(self._directory, self._info, config.draft_bits)
        if config.mode is not Mode.EDGE0:
            return None
        files = _adapter_files(self._directory, config)
        written = _written(files)
        if self._adapters is not None and self._adapters.written == written:
            return self._adapters  # only the budget changes
        prerouter = load_prerouter(self._directory, self._info, next(self._model.parameters()).device)
        _, file = files
        lora = None if file is None else self._load_lora(file)
        return Adapters(prerouter, self.routing_law(), lora, written)

    def _load_lora(self, file: Path) -> Lora:
        lora = read_lora(file)
        check_model(file, lora.metadata, self._info)
        return place_lora(self._model, lora, file)

    def enter(self, config: EngineConfig, tier: Tier, extras: Adapters | DraftFile | None) -> None:
        """Put the configured forecaster in front of the routers, and the LoRA on or the draft ready where there is one."""
        if isinstance(extras, Adapters):
            self._adapters = extras
            self.forecast = PrerouterForecast(tier, extras.prerouter, extras.law)
            if extras.lora is not None:
                install_lora(self._model, extras.lora)
        elif isinstance(extras, DraftFile):
            if self._draft is None:
                device = next(self._model.parameters()).device
                self._draft = load_draft(extras, self._info, *self._experts[0].functions(), device)
            scheduling = Scheduling({"none": "none", "gate": "drafting", "auto": "auto"}[config.prefetch])
            self.forecast = DraftRoutes(tier, self._experts, self._draft, config.prefetch == "gate", scheduling)
        else:
            self.forecast = self._lookahead(config.prefetch)(tier)
        # Where nothing can be missing there is nothing to foresee.
        if extras is not None or (self.supports_gate and not tier.all_resident):
            self.forecast.seams = install(self._model, self._routers, self.forecast)

    def _lookahead(self, prefetch: str) -> type[DemandForecast]:
        """Who foresees where a model's own routers route."""
        if prefetch == "auto" and self.supports_gate:
            return TrialLookahead
        return GateLookahead if prefetch == "gate" else DemandForecast

    def trace(self, watch: Callable[[int, torch.Tensor, Routing], None]) -> None:
        """Let `watch` see all routing of a model that is in no mode, until `leave`."""
        install(self._model, self._routers, watch, TraceSeam)

    def leave(self) -> Adapters | DraftFile | None:
        """The model is then as if no mode had ever been entered. Returns what `enter` would need to enter again."""
        adapters, self._adapters = self._adapters, None
        drafting = isinstance(self.forecast, DraftRoutes)
        remove(self._model, [path for path in self._routers if path])
        if adapters is not None and adapters.lora is not None:
            remove_lora(self._model, list(adapters.lora.pairs))
        if self.forecast is not None:
            self.forecast.tier.forget_forecasts()
            self.forecast.seams = []  # they hold it too: what it holds would stay until the cycle is collected
        self.forecast = None
        return self._draft.file if drafting else adapters

    def release(self, extras: Adapters | DraftFile | None) -> None:
        """Give the draft's memory back unless `extras`, which are about to be entered with, are the draft's."""
        if self._draft is not None and self._draft.file != extras:
            self._draft.close()
            self._draft = None

    def router(self, layer: int) -> nn.Module:
        """The model's own router of MoE layer `layer`."""
        module = self._model.get_submodule(self._routers[layer])
        return module.inner if isinstance(module, RouterSeam) else module

    def routing_law(self) -> RoutingLaw:
        """Raises ConfigError when the routers follow no law that a forecast can."""
        if not self.supports_gate:
            raise ConfigError(f"{self._info.architecture} has no router that a forecast could stand in for: use on-demand "
                              "mode")  # fmt: skip
        if self._law is None:
            self._law = find_law(self.router(-1), self._info.hidden, self._info.top_k, self._info.architecture)
        return self._law
