"""Training Edge0's parts goes through steps that each leave a file, so an interrupted run continues where it stopped.

Chats with the teacher's distributions, what every layer saw of them, the heads, and, where the model's weights fit in float32
memory, the end-to-end recovery of heads and LoRA. The adapters are written at the end, beside a report.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from engine.config import MODELS_DIR, EngineConfig, Mode, format_size
from engine.engine import Engine
from engine.errors import ConfigError
from engine.forecast.heads import FILE as HEADS_FILE
from engine.forecast.heads import HeadFile, write_heads
from engine.forecast.prerouter import decoder_layer
from engine.memory.plan import available_memory
from engine.model.lora import FILE as LORA_FILE
from engine.model.lora import write_lora
from engine.registry import resolve
from engine.store.layout import StoreInfo
from engine.train.chats import Chat
from engine.train.descent import DescentSettings
from engine.train.edge0.capture import capture
from engine.train.edge0.data import gather
from engine.train.edge0.fit import HOLD_OUT, FitSettings, fit_head
from engine.train.edge0.path import TrainedHead
from engine.train.edge0.recover import RecoverySettings, Student, recover

REPORT_FILE = "edge0.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainSettings:
    """start_layer: first decoder layer that is routed by a forecast; the layers before it keep their routers. captured: at
    most so many tokens for fitting the heads; tokens: for recovery. scored: at most so many held-out chats are scored."""

    start_layer: int = 1
    captured: int = 60_000
    tokens: int = 200_000
    scored: int = 24
    max_tokens: int = 192
    seed: int = 0
    fit: FitSettings = FitSettings()
    recovery: RecoverySettings = RecoverySettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = TrainSettings()
    parser.add_argument("model", help="default, a store's name or a store's path")
    parser.add_argument(
        "--data", type=Path, nargs="*", default=[], help=".jsonl conversations, or shards of taught chats"
    )
    parser.add_argument("--self-generate", type=int, default=0, metavar="N", help="let the model write N chats itself")
    parser.add_argument("--work", type=Path, help="directory for what is kept between runs (models/.train/NAME)")
    parser.add_argument("--out", type=Path, help="directory that gets the adapters (the store)")
    parser.add_argument("--captured", type=int, default=defaults.captured, help="most tokens to fit the heads to")
    parser.add_argument("--tokens", type=int, default=defaults.tokens, help="most tokens to recover on")
    parser.add_argument(
        "--start-layer", type=int, default=defaults.start_layer, help="first layer routed by a forecast"
    )
    parser.add_argument("--inner", type=int, default=defaults.fit.inner, help="inner width of a head")
    parser.add_argument("--rank", type=int, default=defaults.recovery.rank, help="rank of the LoRA")
    parser.add_argument("--heads-only", action="store_true", help="no recovery: for a model that only fits streamed")
    parser.add_argument("--expert-memory", default="auto", help="for the model while it is observed")
    parser.add_argument("--seed", type=int, default=defaults.seed)


def within(chats: list[Chat], tokens: int) -> list[Chat]:
    """The first chats that have at most so many tokens together, at least one."""
    total, kept = 0, []
    for chat in chats:
        total += len(chat.ids)
        if kept and total > tokens:
            break
        kept.append(chat)
    return kept


def fit_heads(engine: Engine, chats: list[Chat], work: Path, settings: TrainSettings, say: Say) -> tuple[dict, dict]:
    """(owner among the MoE layers -> head, owner -> agreement on held-out chats)."""
    info = engine.info
    captured = capture(engine, chats, work / "captured")
    say(f"captured {len(captured.chat)} tokens of {len(info.layers)} layers")
    heads, found = {}, {}
    for owner in owners(info, settings.start_layer):
        gate = engine.router_weight(owner + 1)
        heads[owner], found[owner] = fit_head(captured, owner, gate, engine.routing_law(), info.experts, settings.fit)
        say(f"head of layer {decoder_layer(info.layers[owner])}: {json.dumps(found[owner])}")
    return heads, found


def owners(info: StoreInfo, start_layer: int) -> list[int]:
    """MoE layers that own a head: those right before a MoE layer from `start_layer` on."""
    numbers = [decoder_layer(path) for path in info.layers]
    return [i for i, n in enumerate(numbers[:-1]) if numbers[i + 1] == n + 1 and n + 1 >= start_layer]


def train(
    model: str, files: list[Path], self_generate: int, work: Path, out: Path, expert_memory: str, recovered: bool,
    settings: TrainSettings, say: Say,
) -> dict:  # fmt: skip
    """Train the adapters of `model` and write them to `out`; returns the report.

    Raises ConfigError when `out` has adapters already, when there is nothing to train on, or when the model is too large
    to be recovered.
    """
    directory = resolve(model)
    for name in (HEADS_FILE, LORA_FILE):
        if (out / name).exists():
            raise ConfigError(f"{out / name} exists: move it away, or choose another --out")
    work.mkdir(parents=True, exist_ok=True)
    with Engine(EngineConfig(model, expert_memory, mode=Mode.ON_DEMAND)) as engine:
        info, law = engine.info, engine.routing_law()
        needed = 4 * (info.resident_bytes // 2 + len(info.layers) * info.experts * weights_of(info)) * 2
        if recovered and needed > available_memory(torch.device("cpu")):
            raise ConfigError(f"recovering {model} takes about {format_size(needed)} of memory, which is not free: train the "
                              "heads alone with --heads-only")  # fmt: skip
        chats = gather(engine, files, self_generate, work, settings.seed, settings.max_tokens, say)
        some = within(chats, settings.tokens)
        held_out = some[::HOLD_OUT][: settings.scored]
        training = [chat for i, chat in enumerate(some) if i % HOLD_OUT]
        kept = work / "heads.pt"
        if kept.is_file():
            saved = torch.load(kept, weights_only=True)
            heads = {owner: TrainedHead(**tensors) for owner, tensors in saved["heads"].items()}
            found = saved["agreement"]
        else:
            heads, found = fit_heads(engine, within(chats, settings.captured), work, settings, say)
            torch.save({"heads": {o: h.tensors() for o, h in heads.items()}, "agreement": found}, kept)
            shutil.rmtree(work / "captured")
    metadata = {
        "format_version": "1",
        "model": info.source,
        "model_sha256": info.source_sha256,
        "K": str(info.top_k),
        "trained_on": f"{sum(len(c.ids) for c in training)} tokens of {len(training)} chats",
        "settings": json.dumps(asdict(settings)),
        "versions": json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}),
    }
    number = {layer: decoder_layer(path) for layer, path in enumerate(info.layers)}
    report = {**metadata, "agreement": {number[o + 1]: a for o, a in found.items()}}
    lora = None
    if recovered:
        student = Student(directory, info, heads, law, settings.recovery)
        report["before"] = student.score(held_out)
        say(f"before recovery: KL {report['before']['kl']:.4f}")
        torch.set_num_threads(1)  # from here on there is a thread a core, each with matrices of its own
        recover(student, training, settings.recovery, work / "recovery.pt", lambda step: say(json.dumps(step)))
        report["after"] = student.score(held_out)
        say(f"after recovery: KL {report['after']['kl']:.4f}")
        lora = student.as_lora({**metadata, "kind": "lora"})
    consumers = ",".join(str(number[owner + 1]) for owner in heads)
    file = HeadFile({number[o]: head.tensors() for o, head in heads.items()},
                    {**metadata, "kind": "prerouter", "consumers": consumers})  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    if lora is not None:
        write_lora(out / LORA_FILE, lora)
    write_heads(out / HEADS_FILE, file)
    (out / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def weights_of(info: StoreInfo) -> int:
    """Weights of one expert."""
    return sum(form.shape[0] * form.shape[1] for form in info.layout.formats.values())


def run(args: argparse.Namespace) -> dict:
    directory = resolve(args.model)
    settings = TrainSettings(
        start_layer=args.start_layer,
        captured=args.captured,
        tokens=args.tokens,
        seed=args.seed,
        fit=FitSettings(inner=args.inner, seed=args.seed),
        recovery=RecoverySettings(rank=args.rank, descent=DescentSettings(seed=args.seed)),
    )
    work = args.work or MODELS_DIR / ".train" / directory.name
    return train(args.model, args.data, args.self_generate, work, args.out or directory, args.expert_memory,
                 not args.heads_only, settings, lambda line: print(line, flush=True))  # fmt: skip
