"""Configuration is frozen, validated where it is made, and passed as an argument: no global, no environment
variable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from engine.errors import ConfigError

PROJECT_DIR = Path(__file__).resolve().parent.parent
MODELS_DIR = PROJECT_DIR / "models"  # prepared stores live here, one directory each
DEFAULT_MODEL = "default"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


class Mode(str, Enum):
    """Who foresees the experts; see the README's table."""

    ON_DEMAND = "on-demand"
    EDGE0 = "edge0"
    SPECTER = "specter"


PREFETCH = ("auto", "gate", "none")
RESIDENT = ("native", "int4")
EXPERT_FORMATS = ("bf16", "int8", "int4")
DRAFT_BITS = (4, 3, 2)
MISSES = ("copy", "cpu", "auto")
MAX_DEPTH = 32  # draft tokens a window


def parse_size(text: str | int, whole: int | None = None, name: str = "size") -> int:
    """Bytes of `64MiB`, `1.5GiB`, `800MB`, `25%` (of `whole`, in bytes) or a plain number of bytes.

    Raises ConfigError when `text` is none of these, is negative, or is a percentage where `whole` is unknown.
    """
    if isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[A-Za-z]*)\s*", text)
        if match is None or (match[2] != "%" and match[2].upper() not in _UNITS):
            raise ConfigError(f"{name} '{text}' is not a size: write 64MiB, 1.5GiB or 25%")
        if match[2] == "%":
            if whole is None:
                raise ConfigError(f"{name} '{text}': a percentage has no meaning here, write 64MiB or 1.5GiB")
            size = int(float(match[1]) / 100 * whole)
        else:
            size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 0:
        raise ConfigError(f"{name} '{text}' is negative")
    return size


def parse_depth(text: str) -> str | int:
    """The depth that a command line names: `auto` or a number; what numbers there are EngineConfig says."""
    return int(text) if text.isdigit() else text


def format_size(size: int | float) -> str:
    """`size` bytes for people, in binary units with three significant digits: `64.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass(frozen=True)
class EngineConfig:
    """How a model is loaded.

    model: `default`, the name of a store under `models/`, or the path of a store directory.
    expert_memory: bytes for experts: `64MiB`, `1.5GiB`, `25%` of the experts' bytes, or `auto` (what the plan finds free,
        at most all experts). In specter mode the draft's bytes are part of it, the slots get the rest.
    context: the longest prompt + reply, in tokens, that the plan reserves KV memory for.
    mode: `on-demand` routes as the model was trained to; `edge0` routes by the model's prerouter heads, one token ahead;
        `specter` lets a draft of the model speculate and verifies every token.
    prefetch: `gate` looks the next layer's own gate up early, `none` fetches on demand; both give the same tokens. `auto`
        measures both while decoding and goes on with the faster one. In specter mode it is the draft's routes that fetch, or do
        not, and `gate` also looks ahead where nothing was drafted.
    lora: in edge0 mode, apply the recovery LoRA that belongs to the heads; the other modes never do.
    depth: in specter mode, draft tokens a window, 0 to 32; `auto` lets the governor choose for every window.
    draft_bits: in specter mode, bits of the draft's experts: 4, 3 or 2.
    resident: `native` keeps non-expert weights as they are in the store, `int4` quantises the large linears.
    device: `auto`, `cpu` or `cuda`.
    page_cache: read the store through the operating system's page cache instead of around it. Faster when RAM is
        plentiful, but then the memory shown is not all the memory used.
    read_threads: concurrent reads of the store.
    host_memory: on CUDA, bytes of host memory that hold experts between the SSD and the device; `auto` takes most of
        what is free. On the CPU experts are computed from host memory, and `expert_memory` is all there is to set.
    misses: on CUDA, what becomes of an expert that is missing on the device: `copy` it there, compute it on the `cpu` from
        host memory, or `auto`, whatever ends sooner by what both were measured to take. The result may differ in rounding.
        Forwards of many tokens always copy. Over an emulated link `auto` copies; elsewhere there is nothing to choose.
    emulated_link: for benchmarks on the CPU: bytes a second (`800MB`) at which experts are copied to their slots from host
        memory that holds them all, in place of reading the store.
    """

    model: str = DEFAULT_MODEL
    expert_memory: str | int = "auto"
    context: int = 4096
    mode: Mode = Mode.ON_DEMAND
    prefetch: str = "auto"
    lora: bool = True
    depth: str | int = "auto"
    draft_bits: int = 4
    resident: str = "native"
    device: str = "auto"
    page_cache: bool = False
    read_threads: int = 4
    host_memory: str | int = "auto"
    misses: str = "auto"
    emulated_link: str | int | None = None

    def __post_init__(self) -> None:
        _one_of("prefetch", self.prefetch, PREFETCH)
        _one_of("resident", self.resident, RESIDENT)
        _one_of("misses", self.misses, MISSES)
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        if self.depth != "auto" and not (isinstance(self.depth, int) and 0 <= self.depth <= MAX_DEPTH):
            raise ConfigError(f"depth '{self.depth}' is not possible: choose auto, or 0 to {MAX_DEPTH} draft tokens")
        if self.draft_bits not in DRAFT_BITS:
            raise ConfigError(f"draft bits {self.draft_bits} is not possible: choose from {', '.join(map(str, DRAFT_BITS))}")
        _at_least("context", self.context, 16)
        _at_least("read threads", self.read_threads, 1)
        if not isinstance(self.mode, Mode):
            raise ConfigError(f"mode '{self.mode}' is unknown: choose from {', '.join(m.value for m in Mode)}")
        if self.expert_memory != "auto":
            parse_size(self.expert_memory, whole=1, name="expert memory")
        if self.host_memory != "auto":
            parse_size(self.host_memory, whole=1, name="host memory")
            if self.device == "cpu":
                raise ConfigError("host memory is for CUDA: on the CPU set the expert memory instead")
        if self.emulated_link is not None:
            if parse_size(self.emulated_link, name="emulated link") == 0:
                raise ConfigError("emulated link: 0 bytes a second never arrive")
            if self.device != "cpu":
                raise ConfigError("a link is emulated on the CPU only: set device cpu")


@dataclass(frozen=True)
class GenerationConfig:
    """How tokens are chosen and when to stop. `temperature == 0` is greedy decoding.

    top_k, top_p, min_p: filters after temperature; 0, 1.0 and 0.0 switch them off.
    stop: strings that end the reply and are not part of it.
    """

    max_tokens: int = 512
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least("max tokens", self.max_tokens, 1)
        _at_least("temperature", self.temperature, 0)
        _at_least("top k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top p {self.top_p} is outside (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min p {self.min_p} is outside [0, 1]")
        if self.repetition_penalty <= 0:
            raise ConfigError(f"repetition penalty {self.repetition_penalty} must be above 0; 1 switches it off")
        if any(not text for text in self.stop):
            raise ConfigError("a stop string is empty: it would end every reply at once")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} '{value}' is unknown: choose from {', '.join(allowed)}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} {value} is too small: at least {least}")
