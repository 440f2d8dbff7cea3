"""Preparing never loses what exists: it fills `DESTINATION.partial`, journals each finished unit, and renames at the
end."""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.config import EXPERT_FORMATS, format_size
from engine.errors import ConfigError, SourceError, StoreError
from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.memory.kv import kv_bytes
from engine.model.skeleton import build_skeleton, experts_shape, find_experts, load_config, top_k
from engine.store.layout import EXPERTS_FILE, INFO_FILE, RESIDENT_FILE, RecordLayout, StoreInfo, read_info, write_info
from engine.store.mapping import Unit, plan_units
from engine.store.progress import Progress, ProgressCallback, check_cancelled
from engine.store.source import Source, fingerprint, open_source, read_header, weight_map

_JOURNAL = "journal.jsonl"
_COPIED = ("config.json", "generation_config.json", "*.jinja", "tokenizer*", "special_tokens_map.json", "vocab*",
           "merges.txt", "added_tokens.json", "*.model", "chat_template*", "LICENSE*", "NOTICE*")  # fmt: skip
_SYNC_EVERY = 64  # units between a flush of the data to disk and of the journal lines that vouch for it


def prepare(
    source: str | Path,
    destination: Path,
    experts: str = "int4",
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Turn a checkpoint (directory or hub id) into a store at `destination`, and return it.

    Reads one expert at a time and fetches one shard at a time; a run that was killed resumes where it stopped. An
    existing store of the same checkpoint and format is returned as it is; anything else at `destination` is an error.
    Raises ConfigError, SourceError, UnsupportedModelError or StoreError, each saying what to do.
    """
    if experts not in EXPERT_FORMATS:
        raise ConfigError(f"expert format '{experts}' is unknown: choose from {', '.join(EXPERT_FORMATS)}")
    destination = Path(destination)
    checkpoint = open_source(source, progress, cancel)
    try:
        return _prepare(checkpoint, destination, experts, progress or (lambda _: None), cancel)
    finally:
        checkpoint.close()


def _prepare(
    source: Source, destination: Path, experts: str, report: ProgressCallback, cancel: threading.Event | None
) -> Path:
    config = load_config(source.config_dir)
    if getattr(config, "quantization_config", None) is not None:
        raise SourceError(f"{source.name} is already quantised; prepare from its bf16, fp16 or fp32 original")
    model = build_skeleton(config)
    modules = find_experts(model)
    shape = experts_shape(modules)
    mark = fingerprint(source)
    if destination.exists():
        return _existing(destination, mark, experts)
    paths = list(modules)
    shards = weight_map(source)
    units, unused = plan_units(model, paths, shape, list(shards))
    packing = int4.native_packing()
    try:
        formats = {name: MatrixFormat.choose(experts, size, packing) for name, size in shape.matrices().items()}
    except ValueError as error:
        raise ConfigError(f"{source.name}: {error}; choose --experts int8 or bf16") from error
    layout = RecordLayout.make(formats, shape.biases())
    tensors = model.state_dict()
    resident = [name for unit in units if unit.expert is None for name in _targets(unit) if name in tensors]
    header = _resident_header(model, {name: tensors[name] for name in sorted(resident)})
    per_token, fixed = kv_bytes(model)
    routed = len(paths) * shape.experts * shape.parameters()
    total = routed + sum(tensors[name].numel() for name in header.entries)
    info = StoreInfo(
        model_type=config.model_type,
        architecture=type(model).__name__,
        layers=tuple(paths),
        experts=shape.experts,
        top_k=top_k(model, paths[0]),
        hidden=shape.hidden,
        expert_format=experts,
        layout=layout,
        resident_bytes=header.file_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_fixed=fixed,
        quantised_share=0.0 if experts == "bf16" else routed / total,
        source=Path(source.name).name if Path(source.name).exists() else source.name,
        source_sha256=mark,
    )
    work = destination.with_name(destination.name + ".partial")
    needed = info.expert_bytes_total + header.file_bytes
    with _disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        journal = _Journal(work, {"source": mark, "experts": experts, "packing": info.packing})
        _check_disk(work, needed)
        _write_units(work, source, model, shape, units, shards, info, header, journal, report, cancel)
        _copy_small_files(source.config_dir, work)
        crc = tuple(journal.records[f"{path}[{e}]"] for path in paths for e in range(shape.experts))
        write_info(work, replace(info, crc32=crc))
        journal.remove()
        work.replace(destination)
    report(Progress(f"prepared {destination.name} ({len(unused)} unused tensors left out)", 1, 1, "steps"))
    return destination


def _existing(destination: Path, mark: str, experts: str) -> Path:
    if not (destination / INFO_FILE).is_file():
        raise StoreError(f"{destination} exists and is not a store; choose another destination or remove it")
    info = read_info(destination)
    if info.source_sha256 != mark or info.expert_format != experts:
        raise StoreError(f"{destination} holds another store ({info.source}, {info.expert_format}); "
                         "choose another destination or remove it")  # fmt: skip
    return destination


def _write_units(work, source, model, shape, units, shards, info, header, journal, report, cancel) -> None:
    """Write every unit that the journal does not vouch for, opening each shard once and releasing it after its last
    use."""
    names = {name: i for i, name in enumerate(source.shards)}
    needs = {unit.name: sorted({names[shards[key]] for key in unit.keys(shape.experts)}) for unit in units}
    left = [unit for unit in units if unit.name not in journal.records]
    left.sort(key=lambda unit: needs[unit.name][-1])
    uses = Counter(shard for unit in left for shard in needs[unit.name])
    done = len(units) - len(left)
    tensors = _ShardReader(source, shards, shape.experts)
    expert_name = [name for name in source.shards if uses[names[name]] == 0]
    for name in expert_name:
        source.release_shard(name)
    with _create(work / EXPERTS_FILE, info.expert_bytes_total) as experts_file, header.open(work) as resident_file:
        for unit in left:
            check_cancelled(cancel)
            report(Progress(f"preparing {work.stem}", done, len(units), "tensors"))
            built = unit.build(model, shape, tensors.read)
            if unit.expert is None:
                for name, tensor in built.items():
                    header.write(resident_file, name, tensor)
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
                    tensors.release(source.shards[shard])
        journal.flush((experts_file, resident_file))


class _ShardReader:
    """Tensors by name from whichever shard holds them; a few shards are kept open. `experts`: in a layer."""

    def __init__(self, source: Source, shards: dict[str, str], experts: int) -> None:
        self.source, self.shards, self.experts = source, shards, experts
        self.open: OrderedDict[str, object] = OrderedDict()

    def read(self, key: str, row: int | None) -> torch.Tensor:
        """The tensor `key`, or expert `row`'s slice of it [1, ...]. Raises SourceError naming the shard."""
        shard = self.shards[key]
        try:
            if shard not in self.open:
                path = self.source.open_shard(shard)
                read_header(path)
                self.open[shard] = safe_open(path, framework="pt")
            if row is None:
                return self.open[shard].get_tensor(key)
            rows = self.open[shard].get_slice(key)
            if rows.get_shape()[0] == self.experts:
                return rows[row : row + 1]
        except (SafetensorError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SourceError(f"cannot read {key} from {shard} of {self.source.name}: {reason}; "
                              "download the checkpoint again") from error  # fmt: skip
        raise SourceError(f"{key} in {shard} of {self.source.name} holds {rows.get_shape()[0]} experts where config.json "
                          f"says {self.experts}; the checkpoint does not match its config.json")  # fmt: skip

    def release(self, shard: str) -> None:
        self.open.pop(shard, None)
        self.source.release_shard(shard)


class _ResidentHeader:
    """A safetensors file laid out before its tensors are known, so that they can be written in any order."""

    def __init__(self, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        codes = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
                 torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL", torch.float64: "F64"}  # fmt: skip
        self.entries, offset, table = {}, 0, {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape) in tensors.items():
            size = dtype.itemsize * torch.Size(shape).numel()
            self.entries[name] = (dtype, shape, offset)
            table[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        self.prefix = len(text).to_bytes(8, "little") + text
        self.file_bytes = len(self.prefix) + offset

    def open(self, directory: Path):
        file = _create(directory / RESIDENT_FILE, self.file_bytes)
        file.seek(0)
        file.write(self.prefix)
        return file

    def write(self, file, name: str, tensor: torch.Tensor) -> None:
        dtype, shape, offset = self.entries[name]
        if tuple(tensor.shape) != tuple(shape):
            raise SourceError(f"checkpoint tensor {name} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)}; "
                              "the checkpoint does not match its config.json")  # fmt: skip
        file.seek(len(self.prefix) + offset)
        file.write(tensor.to(dtype).contiguous().flatten().view(torch.uint8).numpy())


def _targets(unit: Unit) -> Iterator[str]:
    """Names of the model tensors a resident unit may make."""
    for recipe in unit.recipes:
        patterns = list(getattr(recipe.converter, "target_patterns", []))
        yield recipe.target
        yield from (recipe.target.replace(patterns[0], other) for other in patterns[1:])


def _resident_header(model, tensors: dict[str, torch.Tensor]) -> _ResidentHeader:
    plan = model._get_dtype_plan(model.dtype)  # transformers keeps some modules in fp32 whatever the model's dtype
    entries = {}
    for name, tensor in tensors.items():
        keep = next((dtype for part, dtype in plan.items() if part in name), tensor.dtype)
        entries[name] = (keep, tuple(tensor.shape))
    return _ResidentHeader(entries)


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


def _create(path: Path, size: int):
    """`path` opened for writing anywhere in `size` bytes, keeping what it holds."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    return file


def _copy_small_files(source: Path, work: Path) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".safetensors":
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
