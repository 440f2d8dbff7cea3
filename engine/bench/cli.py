"""`python -m engine bench NAME`: prepares what a benchmark needs in a temporary directory, runs it, saves the
result."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from engine.bench.ablations import run_ablations
from engine.bench.edge0 import RATIOS, run_edge0
from engine.bench.fidelity import run_fidelity
from engine.bench.greedy import run_greedy
from engine.bench.measure import RESULTS_DIR, save
from engine.bench.overhead import run_overhead
from engine.bench.peers import run_peers
from engine.bench.specter import MEMORIES, run_specter
from engine.bench.stream import run_stream
from engine.bench.synthetic import SHAPES, Shape, write_checkpoint, write_synthetic
from engine.config import DEFAULT_MODEL, DRAFT_BITS, EXPERT_FORMATS, format_size, parse_depth
from engine.errors import ConfigError, PlanError
from engine.memory.plan import available_memory
from engine.store.draft import build_draft
from engine.store.layout import read_info

_BYTES_PER_WEIGHT = {"bf16": 2.0, "int8": 1.01, "int4": 0.5625}


BENCHMARKS = ("stream", "overhead", "peers", "edge0", "specter", "specter-ablations", "specter-fidelity",
              "specter-greedy")  # fmt: skip
_WITH_CHECKPOINT = ("overhead", "peers", "specter-greedy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--model", default=DEFAULT_MODEL, choices=(DEFAULT_MODEL, *SHAPES),
                        help="the default model, or a synthetic store of a real model's shape")  # fmt: skip
    parser.add_argument("--layers", type=int, help="only the first so many layers of a synthetic model")
    parser.add_argument("--experts", choices=EXPERT_FORMATS, default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="tokens timed in one measurement")
    parser.add_argument("--warm-up", type=int, default=24, help="tokens generated before each measurement")
    parser.add_argument("--memory", help="peers, edge0 (25%%), specter-ablations (45%%): expert memory, a size or a share")
    parser.add_argument("--ratio", type=float, default=4.0, help="specter-ablations: transfer : compute on demand")
    parser.add_argument("--depth", type=parse_depth, default="auto", help="specter: draft tokens a window, or auto")
    parser.add_argument("--draft-bits", type=int, choices=DRAFT_BITS, nargs="+", default=[4], help="specter: of the drafts")
    parser.add_argument("--work", type=Path, help="where temporary stores go (the system's temporary directory)")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR)


def run(args: argparse.Namespace) -> dict:
    """Run one benchmark and return what was saved."""
    shape = _shape(args)
    label = f"{args.model}{f'-{args.layers}-layers' if args.layers else ''}-{args.experts}"
    if args.benchmark == "specter-greedy" and shape:
        raise ConfigError(f"specter-greedy compares texts, and random weights write none: choose --model {DEFAULT_MODEL}")
    with tempfile.TemporaryDirectory(prefix="outrider-bench-", dir=args.work) as work:
        checkpoint, store = _stores(args, shape, Path(work))
        if args.benchmark == "stream":
            result = run_stream(label, store, args.repeats, args.tokens, args.warm_up)
        elif args.benchmark == "overhead":
            result = run_overhead(label, checkpoint, store, args.repeats, args.tokens)
        elif args.benchmark == "edge0":
            fits = 1.5 * read_info(store).expert_bytes_total < available_memory(torch.device("cpu"))
            result = run_edge0(label, store, args.memory or "25%", args.repeats, args.tokens, args.warm_up, RATIOS, fits)
        elif args.benchmark == "specter-greedy":
            memory, bits = args.memory or "45%", args.draft_bits[0]
            result = run_greedy(label, checkpoint, store, Path(work), 56, args.tokens, memory, bits)
        elif args.benchmark.startswith("specter"):
            result = _specter(args, label, store)
        else:
            result = run_peers(label, checkpoint, store, args.memory or "25%", args.repeats, args.tokens)
    path = save(f"{args.benchmark}-{label}", result, args.results)
    print(f"saved {path}")
    return {**result, "saved": str(path)}


def _specter(args: argparse.Namespace, label: str, store: Path) -> dict:
    bits = tuple(args.draft_bits)
    for b in bits:
        build_draft(store, read_info(store), b)
    if args.benchmark == "specter-fidelity":
        return run_fidelity(label, store, args.tokens, bits)
    if args.benchmark == "specter-ablations":
        memory = args.memory or "45%"
        return run_ablations(label, store, args.repeats, args.tokens, args.warm_up, memory, args.ratio, bits)
    memories = (args.memory,) if args.memory else MEMORIES
    return run_specter(label, store, args.repeats, args.tokens, args.warm_up, memories, bits=bits[0], depth=args.depth)


def _shape(args: argparse.Namespace) -> Shape | None:
    """Of the synthetic model; None for the default model."""
    if args.model == DEFAULT_MODEL:
        if args.layers:
            raise ConfigError("--layers makes a synthetic model smaller: choose one with --model, " + ", ".join(SHAPES))
        return None
    shape = SHAPES[args.model]
    if args.layers is None:
        return shape
    most = shape.arguments["num_hidden_layers"]
    if not 1 <= args.layers <= most:
        raise ConfigError(f"--layers {args.layers}: {args.model} has 1 to {most}")
    return shape.first_layers(args.layers)


def _stores(args: argparse.Namespace, shape: Shape | None, work: Path) -> tuple[Path | None, Path]:
    """(checkpoint directory, None where none is compared with; store) to measure."""
    from engine.store.default_model import add_adapters, build_checkpoint
    from engine.store.writer import prepare

    compared = args.benchmark in _WITH_CHECKPOINT
    if shape is None:
        checkpoint = build_checkpoint(work / "checkpoint")
        store = prepare(checkpoint, work / "store", args.experts)
        add_adapters(store)
        return checkpoint, store
    _check_disk(args, shape, compared, work)
    # In a process of its own: what writing leaves in the heap would be counted as the engine's resident set.
    with ProcessPoolExecutor(1, get_context("spawn")) as writer:
        if not compared:
            return None, writer.submit(write_synthetic, shape, work / "store", args.experts).result()
        checkpoint = writer.submit(write_checkpoint, shape, work / "checkpoint").result()
        return checkpoint, writer.submit(prepare, checkpoint, work / "store", args.experts).result()


def _check_disk(args: argparse.Namespace, shape: Shape, compared: bool, work: Path) -> None:
    made = shape.arguments
    inner = made.get("moe_intermediate_size", made.get("intermediate_size"))
    weights = 3 * made["hidden_size"] * inner * made["num_experts"] * made["num_hidden_layers"]
    needed = int(weights * _BYTES_PER_WEIGHT[args.experts]) + 2 * 2**30
    if compared:  # the checkpoint, and what the peer puts aside
        needed += int(2 * weights * _BYTES_PER_WEIGHT["bf16"])
    free = shutil.disk_usage(work).free
    if free < needed:
        raise PlanError(f"{work} has {format_size(free)} free and the synthetic model needs {format_size(needed)}: "
                        "choose another place with --work")  # fmt: skip
