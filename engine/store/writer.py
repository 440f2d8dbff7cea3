"""Preparing never loses what exists: it fills `DESTINATION.partial`, journals each finished unit, and renames at the
end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EXPERT_FORMATS, RESIDENT, format_size
from engine.errors import ConfigError, StoreError
from engine.store.adapter import adapters
from engine.store.blueprint import Blueprint, draw
from engine.store.layout import EXPERTS_FILE, INFO_FILE, RESIDENT_FILE, StoreInfo, read_info, write_info
from engine.store.mapping import Unit
from engine.store.mlx import in_packing
from engine.store.progress import Progress, ProgressCallback, check_cancelled
from engine.store.resident import open_sized
from engine.store.source import Source, open_source

_JOURNAL = "journal.jsonl"
_COPIED = ("config.json", "generation_config.json", "*.jinja", "tokenizer*", "special_tokens_map.json", "vocab*",
           "merges.txt", "added_tokens.json", "*.model", "chat_template*", "LICENSE*", "NOTICE*")  # fmt: skip
_SYNC_EVERY = 64  # units between a flush of the data to disk and of the journal lines that vouch for it


def prepare(
    source: str | Path,
    destination: Path,
    experts: str | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    *,
    resident: str | None = None,
    top_k: int | None = None,
) -> Path:
    """Turn a checkpoint (directory or hub id) into a store at `destination`, and return it.

    experts: `bf16`, `int8` or `int4`; resident: `native`, or `int4` for the large linears and the token embedding. None
    keeps what MLX quantised to 4 bits as it is (8-bit experts become int8, other 8-bit weights the model's dtype); of any
    other checkpoint it is int4 experts and native resident weights. top_k: experts a token is routed to; None is the
    number that prerouter heads beside the checkpoint were trained for, else the checkpoint's own.

    Reads one expert at a time and fetches one shard at a time; a run that was killed resumes where it stopped. An
    existing store of the same checkpoint and formats is returned as it is; anything else at `destination` is an error.
    Raises ConfigError, SourceError, UnsupportedModelError or StoreError, each saying what to do.
    """
    for name, value, known in (("expert", experts, EXPERT_FORMATS), ("resident", resident, RESIDENT)):
        if value is not None and value not in known:
            raise ConfigError(f"{name} format '{value}' is unknown: choose from {', '.join(known)}")
    destination = Path(destination)
    checkpoint = open_source(source, progress, cancel)
    try:
        return _prepare(checkpoint, destination, experts, resident, top_k, progress or (lambda _: None), cancel)
    finally:
        checkpoint.close()


def _prepare(
    source: Source,
    destination: Path,
    experts: str | None,
    resident: str | None,
    top_k: int | None,
    report: ProgressCallback,
    cancel: threading.Event | None,
) -> Path:
    plan = draw(source, experts, resident, top_k)
    if destination.exists():
        return _existing(destination, plan.info)
    info, work = plan.info, destination.with_name(destination.name + ".partial")
    beside = adapters(source.config_dir)
    needed = info.expert_bytes_total + info.resident_bytes + sum(path.stat().st_size for path in beside)
    with _disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        journal = _Journal(work, _identity(plan))
        _check_disk(work, needed)
        _write_units(work, source, plan, journal, report, cancel)
        _copy_small_files(source.config_dir, work, beside)
        if plan.settings.content is not None:
            (work / "config.json").write_text(json.dumps(plan.settings.content, indent=2) + "\n", encoding="utf-8")
        crc = tuple(journal.records[f"{path}[{e}]"] for path in info.layers for e in range(info.experts))
        write_info(work, replace(info, crc32=crc))
        journal.remove()
        work.replace(destination)
    report(Progress(f"prepared {destination.name} ({len(plan.unused)} unused tensors left out)", 1, 1, "steps"))
    return destination


def _identity(plan: Blueprint) -> dict:
    """What must be the same for a resumed run to use what was begun."""
    info = plan.info
    return {"source": info.source_sha256, "experts": info.expert_format, "packing": info.packing, "top_k": info.top_k,
            "resident": info.resident_format, "resident_packing": info.resident_packing,
            "resident_layout": hashlib.sha256(plan.resident.prefix).hexdigest()}  # fmt: skip


def _existing(destination: Path, wanted: StoreInfo) -> Path:
    if not (destination / INFO_FILE).is_file():
        raise StoreError(f"{destination} exists and is not a store; choose another destination or remove it")
    info = read_info(destination)
    same = ("source_sha256", "expert_format", "resident_format", "top_k")
    if any(getattr(info, name) != getattr(wanted, name) for name in same):
        what = [info.source, info.expert_format]
        what += ["resident weights int4"] if info.resident_format == "int4" else []
        what += [f"{info.top_k} experts a token"] if info.top_k != wanted.top_k else []
        raise StoreError(f"{destination} holds another store ({', '.join(what)}); "
                         "choose another destination or remove it")  # fmt: skip
    return destination


def _write_units(
    work: Path,
    source: Source,
    plan: Blueprint,
    journal: _Journal,
    report: ProgressCallback,
    cancel: threading.Event | None,
) -> None:
    """Write every unit that the journal does not vouch for, opening each shard once and releasing it after its last
    use."""
    checkpoint, info, units = plan.checkpoint, plan.info, plan.units
    order = {name: i for i, name in enumerate(source.shards)}
    needs = {unit.name: _shards(unit, plan, order) for unit in units}
    left = [unit for unit in units if unit.name not in journal.records]
    left.sort(key=lambda unit: needs[unit.name][-1])
    uses = Counter(shard for unit in left for shard in needs[unit.name])
    done = len(units) - len(left)
    for name in source.shards:
        if uses[order[name]] == 0:
            source.release_shard(name)
    experts_path = work / EXPERTS_FILE
    with open_sized(experts_path, info.expert_bytes_total) as experts_file, plan.resident.open(work) as resident_file:
        for unit in left:
            check_cancelled(cancel)
            report(Progress(f"preparing {work.stem}", done, len(units), "tensors"))
            built = _build(unit, plan)
            if unit.expert is None:
                for name, tensor in built.items():
                    plan.resident.write(resident_file, name, tensor)
                crc = 0
            else:
                record = info.layout.encode(built).numpy()
                layer, expert = unit.expert
                experts_file.seek((layer * info.experts + expert) * info.layout.record_bytes)
                experts_file.write(record)
                crc = zlib.crc32(record)
            journal.add(unit.name, crc, (experts_file, resident_file))
            done += 1
            for shard in needs[unit.name]:
                uses[shard] -= 1
                if uses[shard] == 0:
                    checkpoint.release(source.shards[shard])
        journal.flush((experts_file, resident_file))


def _shards(unit: Unit, plan: Blueprint, order: dict[str, int]) -> list[int]:
    """Numbers of the shards that `unit` reads, ascending."""
    keys = unit.keys(plan.shape.experts)
    return sorted({order[shard] for key in keys for shard in plan.checkpoint.shards_of(key)})


def _build(unit: Unit, plan: Blueprint) -> dict[str, torch.Tensor | dict[str, torch.Tensor]]:
    """What `unit` makes, by name: codes where both the checkpoint and the store have them, else tensors."""
    if unit.expert is not None:
        forms = {name: form for name, form in plan.info.layout.formats.items() if form.kind == "int4"}
    else:
        forms = {f"{path}.weight": form for path, form in plan.resident.int4.items()}
    wanted = bool(forms) if unit.expert else all(recipe.target in forms for recipe in unit.recipes)
    codes = plan.checkpoint.codes(unit) if wanted else None
    if codes is None:
        return unit.build(plan.model, plan.shape, plan.checkpoint.read)
    return {name: in_packing(part, forms[name]) for name, part in codes.items()}


class _Journal:
    """Lines of finished units after one that says what is prepared; a line is only on disk after its data.

    What was begun from another checkpoint or in another format is of no use, nor are lines without their data.
    """

    def __init__(self, work: Path, identity: dict) -> None:
        self.path = work / _JOURNAL
        self.records: dict[str, int] = {}
        self.pending: list[str] = []
        whole = all((work / name).is_file() for name in (_JOURNAL, EXPERTS_FILE, RESIDENT_FILE))
        lines = self._parse(self.path.read_text()) if whole else []
        if lines[:1] == [identity]:
            self.records = dict(lines[1:])
        kept = [identity, *([name, crc] for name, crc in self.records.items())]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(self.path)

    @staticmethod
    def _parse(text: str) -> list:
        """The lines of a journal, up to one that a kill cut short: its unit is written again."""
        lines = []
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines

    def add(self, name: str, crc: int, files: tuple) -> None:
        self.records[name] = crc
        self.pending.append(json.dumps([name, crc]))
        if len(self.pending) >= _SYNC_EVERY:
            self.flush(files)

    def flush(self, files: tuple) -> None:
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        with self.path.open("a") as journal:
            journal.write("".join(line + "\n" for line in self.pending))
        self.pending.clear()

    def remove(self) -> None:
        self.path.unlink()


def _copy_small_files(source: Path, work: Path, beside: list[Path]) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copyfile(path, work / path.name)
    for path in beside:
        shutil.copyfile(path, work / path.name)


def _check_disk(work: Path, needed: int) -> None:
    held = sum(path.stat().st_blocks * 512 if hasattr(path.stat(), "st_blocks") else path.stat().st_size
               for path in work.iterdir())  # fmt: skip
    free = shutil.disk_usage(work).free
    if free + held < needed + 64 * 2**20:
        raise StoreError(f"not enough disk for {work}: the store needs {format_size(needed)}, "
                         f"{format_size(free + held)} are free; free some space or choose another destination")  # fmt: skip


@contextmanager
def _disk_errors(work: Path) -> Iterator[None]:
    """Turn an operating-system error while writing into a StoreError; what was written stays for a resume."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {work}: {error.strerror or error}; free some space or choose another destination, "
                         "then prepare again: it resumes where it stopped") from error  # fmt: skip
