"""An arm is a label and one engine configuration; the arms of a run differ in what is being ablated and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import DEFAULT_MODEL, EngineConfig, Mode
from engine.engine import Engine
from engine.errors import ConfigError
from engine.registry import resolve
from engine.store.adapter import adapters
from engine.store.default_model import build_checkpoint
from engine.store.layout import read_info
from engine.store.progress import ProgressCallback
from engine.store.writer import prepare

ABLATED_FORMATS = ("bf16", "int4")


@dataclass(frozen=True)
class Arm:
    """`config.model` is the path of the arm's store."""

    label: str
    config: EngineConfig


def make_arms(
    stores: Sequence[Path], mode: Mode | None = None, lora: bool = True, depth: str | int = "auto", draft_bits: int = 4
) -> list[Arm]:
    """Every store on demand, then the last one with its prerouter, without and with the recovery LoRA.

    mode: only the arms of this mode; specter mode, whose tokens are the target's, is scored only when it is asked for, with
    windows of `depth` and a draft of `draft_bits`. lora: False leaves the arm with the LoRA out.
    """
    if mode is Mode.SPECTER:
        return [Arm(f"{read_info(store).expert_format} Specter",
                    EngineConfig(str(store), mode=mode, depth=depth, draft_bits=draft_bits)) for store in stores]  # fmt: skip
    arms = [Arm(f"{read_info(store).expert_format} on demand", EngineConfig(str(store))) for store in stores]
    form, edge0 = read_info(stores[-1]).expert_format, replace(arms[-1].config, mode=Mode.EDGE0)
    arms.append(Arm(f"{form} + prerouter", replace(edge0, lora=False)))
    if lora:
        arms.append(Arm(f"{form} + prerouter + LoRA", edge0))
    return [arm for arm in arms if mode in (None, arm.config.mode)]


def default_stores(work: Path, progress: ProgressCallback) -> list[Path]:
    """The default model's stores in ABLATED_FORMATS: the prepared one where it has the format, others made in `work`."""
    ready = resolve(DEFAULT_MODEL)
    found = {read_info(ready).expert_format: ready}
    missing = [form for form in ABLATED_FORMATS if form not in found]
    if missing:
        checkpoint = build_checkpoint(work / "checkpoint", progress)
        for file in adapters(ready):  # preparing takes along what is beside the checkpoint
            shutil.copy(file, checkpoint)
        found |= {form: prepare(checkpoint, work / form, form, progress) for form in missing}
    return [found[form] for form in ABLATED_FORMATS]


@contextmanager
def open_arm(arm: Arm) -> Iterator[Engine]:
    """The arm's engine. Raises ConfigError when it is not what its label says."""
    with Engine(arm.config) as engine:
        if arm.config.mode is Mode.EDGE0 and arm.config.lora and not engine.stats().lora:
            raise ConfigError(f"{arm.config.model} has no recovery LoRA: leave its arm out with --no-lora")
        yield engine


def check_arms(arms: Sequence[Arm]):
    """Open every arm once, since a long run should not end at its last one; the tokenizer that they share.

    Raises ConfigError where an arm cannot be run.
    """
    if not arms:
        raise ConfigError("no arm is left to be scored: choose another --mode")
    for arm in arms:
        try:
            with open_arm(arm) as engine:
                tokenizer = engine.tokenizer
        except ConfigError as error:
            raise ConfigError(f"the arm '{arm.label}' cannot be run: {error}") from error
    return tokenizer
