"""`python -m engine bench NAME`: prepares what a benchmark needs in a temporary directory, runs it, saves the
result."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from engine.bench.measure import RESULTS_DIR, save
from engine.bench.overhead import run_overhead
from engine.bench.peers import run_peers
from engine.bench.stream import run_stream
from engine.bench.synthetic import SHAPES, write_synthetic
from engine.config import DEFAULT_MODEL, EXPERT_FORMATS, format_size
from engine.errors import PlanError

_BYTES_PER_WEIGHT = {"bf16": 2.0, "int8": 1.01, "int4": 0.5625}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=("stream", "overhead", "peers"))
    parser.add_argument("--model", default=DEFAULT_MODEL, choices=(DEFAULT_MODEL, *SHAPES),
                        help="the default model, or a synthetic store of a real model's shape")  # fmt: skip
    parser.add_argument("--experts", choices=EXPERT_FORMATS, default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="tokens timed in one measurement")
    parser.add_argument("--warm-up", type=int, default=24, help="tokens generated before each measurement")
    parser.add_argument("--share", default="25%", help="peers: share of the bytes of all experts in memory")
    parser.add_argument("--work", type=Path, help="where temporary stores go (the system's temporary directory)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR)


def run(args: argparse.Namespace) -> dict:
    """Run one benchmark and return what was saved."""
    label = f"{args.model}-{args.experts}"
    with tempfile.TemporaryDirectory(prefix="outrider-bench-", dir=args.work) as work:
        checkpoint, store = _stores(args, Path(work))
        if args.benchmark == "stream":
            result = run_stream(label, store, args.repeats, args.tokens, args.warm_up)
        elif args.benchmark == "overhead":
            result = run_overhead(label, checkpoint, store, args.repeats, args.tokens)
        else:
            result = run_peers(label, checkpoint, store, args.share, args.repeats, args.tokens)
    path = save(f"{args.benchmark}-{label}", result, args.results)
    print(f"saved {path}")
    return {**result, "saved": str(path)}


def _stores(args: argparse.Namespace, work: Path) -> tuple[Path | None, Path]:
    """(checkpoint directory or None, store) to measure."""
    if args.model != DEFAULT_MODEL:
        _check_disk(args, work)
        # In a process of its own: what writing leaves in the heap would be counted as the engine's resident set.
        with ProcessPoolExecutor(1, get_context("spawn")) as writer:
            return None, writer.submit(write_synthetic, args.model, work / args.model, args.experts).result()
    from engine.store.default_model import build_checkpoint
    from engine.store.writer import prepare

    checkpoint = build_checkpoint(work / "checkpoint")
    return checkpoint, prepare(checkpoint, work / "store", args.experts)


def _check_disk(args: argparse.Namespace, work: Path) -> None:
    shape = SHAPES[args.model].arguments
    weights = 3 * shape["hidden_size"] * shape["intermediate_size"] * shape["num_experts"] * shape["num_hidden_layers"]
    needed = int(weights * _BYTES_PER_WEIGHT[args.experts]) + 2 * 2**30
    free = shutil.disk_usage(work).free
    if free < needed:
        raise PlanError(f"{work} has {format_size(free)} free and the synthetic store needs {format_size(needed)}: "
                        "choose another place with --work")  # fmt: skip
