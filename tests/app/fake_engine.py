"""A stand-in for the engine's façade: same names, invented tokens at a set pace, so that tests are quick and exact."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.config import EngineConfig, GenerationConfig, Mode, format_size, parse_depth, parse_size
from engine.errors import (
    BusyError,
    ConfigError,
    OutriderError,
    PlanError,
    ReadError,
    SourceError,
    StoreError,
    UnsupportedModelError,
)
from engine.stats import EngineStats

MIB = 2**20
LAYERS, EXPERTS, TOP_K, RECORD = 24, 32, 8, 128 * 1024
TOTAL = LAYERS * EXPERTS * RECORD
LEAST = 2 * TOP_K * RECORD
ESSAY = (
    "A **Mixture-of-Experts** model keeps many small networks and asks only a few of them for each token. "
    "Which ones changes from word to word, so all of them must be *within reach*.\n\n"
    "1. The router scores every expert.\n2. The best few answer.\n3. Their answers are added up.\n\n"
    "```python\nfor expert in router.best(token, k=8):\n    y += weight[expert] * expert(x)\n```\n\n"
    "An outrider rides ahead and has the next experts ready before they are needed."
)


@dataclass(frozen=True)
class Chunk:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Plan:
    model: str
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
    context: int
    device: str
    record_bytes: int
    layers: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class ModelInfo:
    name: str
    path: Path
    architecture: str
    expert_format: str
    layers: int
    experts: int
    top_k: int
    resident_bytes: int
    expert_bytes_total: int


@dataclass(frozen=True)
class Progress:
    stage: str
    done: int
    total: int
    unit: str


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    if not opened and not text.lstrip().startswith("<think>"):
        return "", text
    reasoning, _, answer = text.replace("<think>", "", 1).partition("</think>")
    return reasoning.strip(), answer.lstrip()


@dataclass
class FakeBackend:
    """The façade as one object; the keyword arguments set the pace and what goes wrong."""

    token_s: float = 0.02
    load_s: float = 0.0
    load_error: str = ""
    plan_error: str = ""
    download: threading.Event | None = None  # fetching the default model ends when it is set
    quantise: threading.Event | None = None  # and so does preparing a model
    no_heads: str = ""  # why there are no prerouter heads
    no_draft: str = ""  # why there is no draft
    parks: bool = False  # whether the governor gives the draft up after some tokens
    no_lora: bool = False  # whether the heads come without a recovery LoRA
    MODELS_DIR: Path = Path("models")
    models: list[ModelInfo] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # completion tokens of the generations that `stop` ended
    requests: list[tuple[list[dict], GenerationConfig]] = field(default_factory=list)

    EngineConfig, GenerationConfig, Mode, EngineStats = EngineConfig, GenerationConfig, Mode, EngineStats
    Chunk, Plan, ModelInfo, Progress = Chunk, Plan, ModelInfo, Progress
    OutriderError, ConfigError, PlanError, UnsupportedModelError = (
        OutriderError, ConfigError, PlanError, UnsupportedModelError)  # fmt: skip
    SourceError, StoreError, ReadError, BusyError = SourceError, StoreError, ReadError, BusyError
    format_size, parse_depth, parse_size = map(staticmethod, (format_size, parse_depth, parse_size))
    split_reasoning = staticmethod(split_reasoning)

    def __post_init__(self) -> None:
        for name, fmt in (("default", "bf16"), ("smolmoe-int4", "int4")):
            self.models.append(self._info(name, fmt))

    @staticmethod
    def _info(name: str, fmt: str) -> ModelInfo:
        return ModelInfo(name, Path("models") / name, "qwen2_moe", fmt, LAYERS, EXPERTS, TOP_K, 210 * MIB, TOTAL)

    def list_models(self) -> list[ModelInfo]:
        return list(self.models)

    def plan(self, config: EngineConfig) -> Plan:
        if self.plan_error:
            raise StoreError(self.plan_error)
        budget = config.expert_memory
        budget = TOTAL // 2 if budget == "auto" else min(parse_size(budget, TOTAL, "expert memory"), TOTAL)
        draft = TOTAL * config.draft_bits // 16 if config.mode.value == "specter" else 0
        total = 210 * MIB + budget + 24 * MIB + 12 * MIB
        return Plan(config.model, 210 * MIB, TOTAL, budget, (budget - draft) // RECORD, LEAST + draft, TOTAL, 24 * MIB,
                    12 * MIB, 0, draft, total, 8192 * MIB, 512 * MIB, budget >= LEAST + draft, config.context, "cpu",
                    RECORD, LAYERS, EXPERTS, TOP_K)  # fmt: skip

    def fetch_default(self, progress: Callable[[Progress], None] | None = None) -> Path:
        while self.download is not None and not self.download.wait(0.1):
            if progress is not None:
                progress(Progress("Downloading SmolLM2", 31 * 10**6, 93 * 10**6, "bytes"))
        return Path("models/default")

    def prepare(self, source: str, destination: Path, experts: str = "int4",
                progress: Callable[[Progress], None] | None = None,
                cancel: threading.Event | None = None) -> Path:  # fmt: skip
        if "missing" in source:
            raise SourceError(f"'{source}' is neither a folder nor a model on the hub: check the spelling")
        while self.quantise is not None and not self.quantise.wait(0.05):
            if progress is not None:
                progress(Progress("Quantising experts", 240, 600, "experts"))
            if cancel is not None and cancel.is_set():
                raise SourceError("cancelled")
        self.models.append(self._info(Path(destination).name, experts))
        return Path(destination)

    def Engine(self, config: EngineConfig) -> FakeEngine:  # noqa: N802 - the façade's class name
        time.sleep(self.load_s)
        if self.load_error:
            raise StoreError(self.load_error)
        if config.model not in {info.name for info in self.models}:
            raise StoreError(f"no model '{config.model}' under models/: prepare it first")
        if config.mode is Mode.EDGE0 and self.no_heads:
            raise ConfigError(self.no_heads)
        return FakeEngine(self, config)


class FakeEngine:
    supports_gate = True
    tokenizer = None

    def __init__(self, backend: FakeBackend, config: EngineConfig) -> None:
        self.backend, self.config, self.plan = backend, config, backend.plan(config)
        self.closed = False
        self._busy = threading.Lock()
        self._random = np.random.default_rng(0)
        self._stats = replace(EngineStats(peak_active_bytes=self.plan.total_bytes, rss_bytes=640 * MIB),
                              **self._in_force())  # fmt: skip
        self._draft = self._drafted()
        slots = self._random.permutation(LAYERS * EXPERTS)[: self.plan.slots]
        self._cells = np.zeros(LAYERS * EXPERTS, np.uint8)
        self._cells[slots] = 1

    def _in_force(self) -> dict:
        """The statistics that follow from the settings."""
        edge0 = self.config.mode is Mode.EDGE0
        fmt = next(info.expert_format for info in self.backend.models if info.name == self.config.model)
        ahead = "none" if self.config.prefetch == "none" else "gate"
        return {"mode": self.config.mode.value, "prefetch": ahead, "expert_format": fmt,
                "routing": "prerouter" if edge0 else "router",
                "lora": edge0 and self.config.lora and not self.backend.no_lora,
                "forecast_agreement": 0.871 if edge0 else None,
                "expert_budget_bytes": self.plan.expert_budget_bytes,
                "active_bytes_by_kind": self._kinds()}  # fmt: skip

    def drafts(self) -> tuple[int, ...]:
        return (4, 3, 2)

    def modes(self) -> dict[str, str | None]:
        reasons = {"edge0": self.backend.no_heads, "specter": self.backend.no_draft}
        return {mode.value: reasons.get(mode.value) or None for mode in Mode}

    def _kinds(self) -> dict[str, int]:
        draft = self.plan.draft_bytes
        return {"resident": self.plan.resident_bytes, "experts": self.plan.expert_budget_bytes - draft, "draft": draft,
                "kv": self.plan.kv_bytes // 3, "scratch": self.plan.scratch_bytes}  # fmt: skip

    def _drafted(self, made: int = 0, gone: float = 0.0) -> dict:
        """Specter's statistics after `made` tokens in `gone` seconds: by turns a window accepts all, half and none of the
        drafted tokens. Nothing in the other modes."""
        if self.config.mode.value != "specter":
            return {}
        auto = self.config.depth == "auto"
        parked = auto and self.backend.parks and made > 5
        if parked:
            self.plan = replace(self.plan, draft_bytes=0, slots=self.plan.expert_budget_bytes // RECORD)
        depth = 0 if parked else 6 if auto else self.config.depth
        windows, counts = made // 3, [0] * (depth + 1)
        for i in range(windows):
            counts[(depth, depth // 2, 0)[i % 3]] += 1
        return {"draft_bits": self.config.draft_bits, "draft_depth": depth, "draft_parked": parked,
                "accepted_per_window": tuple(counts) if windows else (),
                "acceptance_by_position": tuple(0.96 ** (i + 1) for i in range(depth)) if windows else (),
                "forecast_recall": 0.934 if windows else None, "draft_s": gone * 0.25, "verify_s": gone * 0.5}  # fmt: skip

    def chat(self, messages: list[dict], generation: GenerationConfig,
             stop: threading.Event | None = None) -> Iterator[Chunk]:  # fmt: skip
        if not self._busy.acquire(blocking=False):
            raise BusyError("the engine is generating")
        self.backend.requests.append((messages, generation))
        begin, made = time.perf_counter(), 0
        try:
            for word in self._words(messages[-1]["content"]):
                # A long story takes minutes, so that there is time to do something while it is written.
                pace = self.backend.token_s * (1 if made < 100 else 20)
                if (stop is not None and stop.wait(pace)) or self.closed:
                    self.backend.stopped.append(made)
                    yield Chunk("", (), "stopped")
                    return
                if word == "\0":
                    raise ReadError("reading experts.bin failed at offset 4096: input/output error. Check the disk")
                made += 1
                self._count(messages, made, begin)
                yield Chunk(word, (made,))
                if made >= generation.max_tokens:
                    yield Chunk("", (), "length")
                    return
            yield Chunk("", (), "stop")
        except GeneratorExit:
            self.backend.stopped.append(made)
            raise
        finally:
            self._cells[self._cells > 1] = 1
            self._busy.release()

    @staticmethod
    def _words(prompt: str) -> list[str]:
        text = ESSAY
        if "think" in prompt:
            text = f"<think>\nThe user asks about *{prompt}*. I weigh what to say first.\n</think>\n\n{ESSAY}"
        if "long" in prompt:
            text = "\n\n".join([ESSAY] * 12)
        if "short" in prompt:
            text = "A short answer."
        words = [word + " " for word in text.split(" ")]
        return words[:8] + ["\0"] if "broken" in prompt else words

    def _count(self, messages: list[dict], made: int, begin: float) -> None:
        now = time.perf_counter()
        asked = made * LAYERS * TOP_K
        read = int(asked * 0.4 * (1 - self.plan.expert_budget_bytes / TOTAL))
        ahead = self._stats.routing == "prerouter" or self._stats.prefetch == "gate"
        late = read // 4 if ahead else 0
        gone = now - begin
        first = self._stats.ttft_s if made > 1 else gone
        self._stats = replace(
            self._stats, prompt_tokens=sum(len(m["content"].split()) for m in messages), completion_tokens=made,
            ttft_s=first, tok_s=(made - 1) / (gone - first) if made > 1 else None, hit_rate=1 - read / asked,
            hits=asked - read, late=late, misses=read - late, bytes_read=read * RECORD, read_s=gone * 0.5,
            stall_s=gone * 0.1, hidden_io=0.8, prefill_tok_s=212.0)  # fmt: skip
        self._draft = self._drafted(made, gone)
        cells = self._cells
        cells[cells > 1] = 1
        lit = self._random.permutation(LAYERS * EXPERTS)[: LAYERS * TOP_K]
        cells[lit] = np.where(cells[lit] == 1, 3, 0)
        absent = np.flatnonzero(cells == 0)
        if len(absent) > 12:
            drawn = self._random.permutation(absent)[:12]
            cells[drawn[:4]], cells[drawn[4:]] = 4, 2
        ready = np.flatnonzero(cells == 1)
        surplus = max(np.count_nonzero(cells) - self.plan.slots, 0)
        cells[self._random.permutation(ready)[:surplus]] = 0

    def opens_reasoning(self, messages: list[dict]) -> bool:
        return "template" in messages[-1]["content"]

    def stats(self) -> EngineStats:
        return replace(self._stats, **self._draft)

    def residency(self) -> np.ndarray:
        return self._cells.reshape(LAYERS, EXPERTS).copy()

    def configure(self, *, expert_memory=None, prefetch=None, mode=None, lora=None, depth=None, draft_bits=None):
        if self._busy.locked():
            raise BusyError("the engine is generating")
        changes = {"expert_memory": expert_memory, "prefetch": prefetch, "mode": mode, "lora": lora, "depth": depth,
                   "draft_bits": draft_bits}  # fmt: skip
        config = replace(self.config, **{k: v for k, v in changes.items() if v is not None})
        if self.modes()[config.mode.value]:
            raise ConfigError(self.modes()[config.mode.value])
        plan = self.backend.plan(config)
        if not plan.fits:
            raise PlanError(f"expert memory {format_size(plan.expert_budget_bytes)} is below the least that works, "
                            f"{format_size(LEAST)}")  # fmt: skip
        self.config, self.plan = config, plan
        self._stats, self._draft = replace(self._stats, **self._in_force()), self._drafted()
        self._cells[:] = 0
        self._cells[self._random.permutation(LAYERS * EXPERTS)[: plan.slots]] = 1

    def reset(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
