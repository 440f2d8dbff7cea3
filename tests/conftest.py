"""Fixtures of the engine's tests: tiny checkpoints and stores are made once a session and never changed by a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.store.writer import prepare
from tests.tiny_models import write_checkpoint

torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """checkpoint(kind, dtype) -> the directory of a tiny checkpoint."""

    @cache
    def make(kind: str, dtype: torch.dtype = torch.float32) -> Path:
        return write_checkpoint(kind, tmp_path_factory.mktemp("checkpoint") / kind, dtype)

    return make


@pytest.fixture(scope="session")
def store(checkpoint, tmp_path_factory) -> Callable[..., Path]:
    """store(kind, experts, dtype) -> the directory of a store prepared from a tiny checkpoint."""

    @cache
    def make(kind: str, experts: str = "bf16", dtype: torch.dtype = torch.float32) -> Path:
        return prepare(checkpoint(kind, dtype), tmp_path_factory.mktemp("store") / f"{kind}-{experts}", experts)

    return make


@pytest.fixture
def own_store(store, tmp_path) -> Callable[..., Path]:
    """Like `store`, but a copy that the test may damage."""

    def make(kind: str = "qwen2_moe", experts: str = "bf16") -> Path:
        return shutil.copytree(store(kind, experts), tmp_path / f"own-{kind}-{experts}")

    return make
