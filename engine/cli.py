"""The command line is a thin shell: it parses, calls the façade, and prints; `--json` prints one JSON object last."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
from importlib import import_module
from pathlib import Path

from engine.config import (
    DEFAULT_MODEL,
    DRAFT_BITS,
    EXPERT_FORMATS,
    MISSES,
    PREFETCH,
    RESIDENT,
    EngineConfig,
    GenerationConfig,
    Mode,
    format_size,
    parse_depth,
)
from engine.errors import ConfigError, OutriderError

# Commands with modules of their own, imported only when they are asked for: name -> module, help.
_ELSEWHERE = {
    "train-default": ("engine.train.recipe", "train the parts of the default model"),
    "train": ("engine.train.edge0.run", "train prerouter heads and the recovery LoRA of a model for Edge0 mode"),
    "bench": ("engine.bench.cli", "measure: stream, overhead, peers, edge0, specter and its ablations and fidelity"),
    "eval": ("engine.eval.cli", "score a model's quality against its teacher"),
}


def main(arguments: list[str]) -> int:
    """Run one command; the process's exit code."""
    try:
        args = _parser(arguments[:1]).parse_args(arguments)
        args.run(args)
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - shown in one line; --debug shows all of it
        if "--debug" in arguments:
            raise
        reason = " ".join(str(error).split())
        if not isinstance(error, OutriderError):
            reason = f"unexpected {type(error).__name__}: {reason}; run the command again with --debug and report it"
        print(f"error: {reason}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Bad arguments are errors like any other: one line."""

    def error(self, message: str) -> None:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _parser(chosen: list[str]) -> argparse.ArgumentParser:
    """chosen: the command, when one is given; the arguments of heavy ones are only made when they are needed."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser = _Parser(prog="python -m engine", description="Stream Mixture-of-Experts models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run, help: str) -> argparse.ArgumentParser:  # noqa: A002 - argparse's own word
        command = commands.add_parser(name, parents=[common], help=help, description=help)
        command.set_defaults(run=run)
        return command

    command = add("prepare", _prepare, "turn a checkpoint directory or hub id into a store")
    command.add_argument("source", help="a Hugging Face checkpoint directory, or a hub id such as org/name")
    command.add_argument("destination", type=Path, help="the store directory to make")
    command.add_argument(
        "--experts", choices=EXPERT_FORMATS, help="format of the experts (int4, or as the source has them)"
    )
    command.add_argument("--resident", choices=RESIDENT, help="format of the other weights (as the source has them)")
    command.add_argument("--top-k", type=int, help="experts a token is routed to, instead of what the checkpoint says")

    command.add_argument("--draft-bits", type=int, nargs="*", choices=DRAFT_BITS, metavar="BITS",
                         help="drafts for specter mode to make too: 4, 3, 2 (4, and none for int4 experts)")  # fmt: skip

    command = add("draft", _draft, "make a draft of a prepared store's experts, for specter mode")
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    command.add_argument("--bits", type=int, choices=DRAFT_BITS, default=4)

    command = add("plan", _plan, "say what would be used, by kind, and whether it fits; nothing is loaded")
    _add_model(command)

    command = add("chat", _chat, "chat with a model; without --prompt interactively")
    _add_model(command)
    command.add_argument("--prompt", help="say this, print the reply and end")
    command.add_argument("--system", help="system prompt")
    command.add_argument("--max-tokens", type=int, default=512)
    command.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    command.add_argument("--temperature", type=float, default=0.7)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--repetition-penalty", type=float, default=1.0)
    command.add_argument("--seed", type=int)
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the reply here; may be repeated"
    )

    command = add("info", _info, "describe a prepared store")
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    command.add_argument("--verify", action="store_true", help="read every expert and compare its checksum")

    add("fetch-default", _fetch_default, "fetch and prepare the default model")

    for name, (module, text) in _ELSEWHERE.items():
        command = add(name, _hand_over, text)
        command.set_defaults(module=module)
        if chosen == [name]:
            import_module(module).add_arguments(command)
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    defaults = EngineConfig()
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="default, a store's name or a store's path")
    command.add_argument("--expert-memory", default="auto", help="64MiB, 1.5GiB, 25%% of the experts' bytes, or auto")
    command.add_argument("--context", type=int, default=defaults.context, help="tokens of prompt and reply to plan for")
    command.add_argument("--mode", choices=[m.value for m in Mode], default=defaults.mode.value)
    command.add_argument("--prefetch", choices=PREFETCH, default=defaults.prefetch)
    command.add_argument("--no-lora", dest="lora", action="store_false", help="edge0: leave the recovery LoRA off")
    command.add_argument("--depth", default=defaults.depth, type=parse_depth, help="specter: draft tokens a window, or auto")
    command.add_argument("--draft-bits", type=int, choices=DRAFT_BITS, default=defaults.draft_bits, help="specter: of the draft")
    command.add_argument("--resident", choices=RESIDENT, default=defaults.resident, help="format of the other weights")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default=defaults.device)
    command.add_argument("--read-threads", type=int, default=defaults.read_threads)
    command.add_argument("--host-memory", default=defaults.host_memory, help="CUDA: host memory for experts, or auto")
    command.add_argument("--misses", choices=MISSES, default=defaults.misses,
                         help="CUDA: copy missing experts, or compute them on the CPU")  # fmt: skip
    command.add_argument("--page-cache", action="store_true", help="read through the system's page cache")


def _config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(args.model, args.expert_memory, args.context, Mode(args.mode), args.prefetch, args.lora,
                        args.depth, args.draft_bits, args.resident, args.device,
                        args.page_cache, args.read_threads, args.host_memory, args.misses)  # fmt: skip


def _print_json(value: dict) -> None:
    print(json.dumps(value, default=str))


def _prepare(args: argparse.Namespace) -> None:
    from engine.store.draft import build_draft
    from engine.store.layout import read_info
    from engine.store.writer import prepare

    with _Bar() as bar:
        path = prepare(args.source, args.destination, args.experts, bar.show, resident=args.resident, top_k=args.top_k)
        info = read_info(path)
        suited = [] if info.expert_format == "int4" else [4]  # a draft of 4 bits would be int4 experts again
        for bits in suited if args.draft_bits is None else args.draft_bits:
            build_draft(path, info, bits, bar.show)
    _describe(path, args.json)


def _draft(args: argparse.Namespace) -> None:
    from engine.registry import resolve
    from engine.store.draft import build_draft
    from engine.store.layout import read_info

    directory = resolve(args.model)
    with _Bar() as bar:
        path = build_draft(directory, read_info(directory), args.bits, bar.show)
    print(f"{path}: {format_size(path.stat().st_size)}")
    if args.json:
        _print_json({"draft": str(path), "bits": args.bits, "bytes": path.stat().st_size})


def _fetch_default(args: argparse.Namespace) -> None:
    from engine.store.default_model import fetch_default

    with _Bar() as bar:
        path = fetch_default(bar.show)
    _describe(path, args.json)


def _info(args: argparse.Namespace) -> None:
    from engine.registry import resolve

    path = resolve(args.model)
    if args.verify:
        from engine.store.verify import verify

        with _Bar() as bar:
            verify(path, bar.show)
    _describe(path, args.json)


def _describe(path: Path, as_json: bool) -> None:
    from engine.registry import describe
    from engine.store.layout import read_info

    info, summary = read_info(path), describe(path)
    if as_json:
        _print_json({**dataclasses.asdict(summary), "record_bytes": info.layout.record_bytes, "packing": info.packing,
                     "kv_bytes_per_token": info.kv_bytes_per_token, "quantised_share": info.quantised_share})  # fmt: skip
        return
    print(f"{summary.name}: {summary.architecture} from {summary.source}")
    print(f"  experts   {summary.layers} layers x {summary.experts}, top-{summary.top_k}, {summary.expert_format}, "
          f"{format_size(info.layout.record_bytes)} each, {format_size(summary.expert_bytes_total)} in all")  # fmt: skip
    print(f"  resident  {format_size(summary.resident_bytes)}")
    print(f"  quantised {info.quantised_share:.1%} of the weights")
    print(f"  KV        {format_size(info.kv_bytes_per_token)} a token")


def _plan(args: argparse.Namespace) -> None:
    from engine.engine import plan

    result = plan(_config(args))
    if args.json:
        _print_json(dataclasses.asdict(result))
        return
    for name, size in (("resident", result.resident_bytes), ("experts", result.expert_budget_bytes),
                       ("KV cache", result.kv_bytes), ("scratch", result.scratch_bytes),
                       ("total", result.total_bytes), ("available", result.available_bytes)):  # fmt: skip
        print(f"{name:10} {format_size(size):>10}")
    total = result.layers * result.experts
    print(f"slots      {result.slots:>10} for {total} experts ({result.slots / total:.0%}), "
          f"at least {format_size(result.min_expert_bytes)}")  # fmt: skip
    result.require_fit()
    print(f"fits, leaving {format_size(result.available_bytes - result.total_bytes)} free")


def _chat(args: argparse.Namespace) -> None:
    from engine.engine import Engine

    generation = GenerationConfig(
        max_tokens=args.max_tokens,
        temperature=0.0 if args.greedy else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    system = [{"role": "system", "content": args.system}] if args.system else []
    with Engine(_config(args)) as engine:
        if args.prompt is None:
            _interactive(engine, system, generation)
            return
        messages = [*system, {"role": "user", "content": args.prompt}]
        result = _reply(engine, messages, generation, show=not args.json)
        if args.json:
            _print_json(result)


def _reply(engine, messages: list[dict], generation: GenerationConfig, show: bool) -> dict:
    """One reply, streamed to stdout if `show`; Ctrl-C stops it and keeps what was said."""
    stop, text, ids, reason = threading.Event(), [], [], None
    chunks = engine.chat(messages, generation, stop)
    try:
        for chunk in chunks:
            text.append(chunk.text)
            ids.extend(chunk.token_ids)
            reason = chunk.finish_reason
            if show:
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        chunks.close()
        reason = "stopped"
    if show:
        print()
    return {"text": "".join(text), "token_ids": ids, "finish_reason": reason, "stats": engine.stats().as_dict()}


def _interactive(engine, system: list[dict], generation: GenerationConfig) -> None:
    print(f"{engine.config.model}, {engine.plan.slots} of {engine.plan.layers * engine.plan.experts} experts in memory. "
          "Ctrl-C stops a reply, /new starts over, /quit ends.")  # fmt: skip
    messages = list(system)
    while True:
        try:
            said = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if said in ("/quit", "/exit"):
            return
        if said == "/new":
            messages = list(system)
            continue
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        result = _reply(engine, messages, generation, show=True)
        messages.append({"role": "assistant", "content": result["text"]})
        stats = result["stats"]
        rate = f"{stats['tok_s']:.1f} tok/s, " if stats["tok_s"] else ""
        hits = f"hit rate {stats['hit_rate']:.0%}, " if stats["hit_rate"] is not None else ""
        print(f"[{stats['completion_tokens']} tokens, {rate}{hits}read {format_size(stats['bytes_read'])}, "
              f"peak active {format_size(stats['peak_active_bytes'])}]")  # fmt: skip


def _hand_over(args: argparse.Namespace) -> None:
    result = import_module(args.module).run(args)
    if args.json:
        _print_json(result)


class _Bar:
    """Shows Progress values on stderr as one tqdm bar a stage."""

    def __enter__(self) -> _Bar:
        from tqdm import tqdm

        self._make, self._bar, self._stage = tqdm, None, None
        return self

    def show(self, progress) -> None:
        if progress.stage != self._stage:
            self.__exit__()
            self._stage = progress.stage
            scaled = progress.unit == "bytes"
            self._bar = self._make(desc=progress.stage, total=progress.total, unit="B" if scaled else progress.unit,
                                   unit_scale=scaled, leave=True)  # fmt: skip
        self._bar.total = progress.total
        self._bar.update(progress.done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
