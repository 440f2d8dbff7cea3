"""Outrider's engine: the façade. Everything an application needs is exported here, and nothing else is public."""

import os

# Before torch is imported: GNU OpenMP's threads would spin at every barrier for as long as it takes, and when another program
# has one of the cores, decoding falls to a tenth of its speed or less. A person's own setting stays.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from engine.config import (
    DEFAULT_MODEL,
    EXPERT_FORMATS,
    MODELS_DIR,
    PREFETCH,
    EngineConfig,
    GenerationConfig,
    Mode,
    format_size,
    parse_depth,
    parse_size,
)
from engine.decode.text import split_reasoning
from engine.engine import Chunk, Engine, plan
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
from engine.memory.plan import Plan
from engine.registry import ModelInfo, list_models
from engine.stats import EngineStats
from engine.store.default_model import fetch_default
from engine.store.progress import CancelledError, Progress
from engine.store.writer import prepare

__all__ = [
    "DEFAULT_MODEL",
    "EXPERT_FORMATS",
    "MODELS_DIR",
    "PREFETCH",
    "BusyError",
    "CancelledError",
    "Chunk",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "GenerationConfig",
    "Mode",
    "ModelInfo",
    "OutriderError",
    "Plan",
    "PlanError",
    "Progress",
    "ReadError",
    "SourceError",
    "StoreError",
    "UnsupportedModelError",
    "fetch_default",
    "format_size",
    "list_models",
    "parse_depth",
    "parse_size",
    "plan",
    "prepare",
    "split_reasoning",
]
