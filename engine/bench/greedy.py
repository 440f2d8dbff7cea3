"""`bench specter-greedy`: greedy replies of Specter mode are plain decoding's, or part from them where rounding may decide.

The model's activations decide how fine its logits are, so it is run with those of its checkpoint and with float32 ones, and
with the same experts. A parting is told with its margin: by how much plain decoding's logits prefer its own token.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.bench.measure import machine, print_table, said
from engine.bench.specter import encode
from engine.config import EngineConfig, GenerationConfig, Mode
from engine.engine import Engine
from engine.store.draft import build_draft
from engine.store.layout import read_info
from engine.store.writer import prepare


@dataclass(frozen=True)
class Parting:
    """Prompt number `prompt`: token number `token` of the reply is another one. margin: of plain decoding's logits there."""

    prompt: int
    token: int
    margin: float


def run_greedy(
    name: str, checkpoint: Path, store: Path, work: Path, prompts: int, tokens: int, memory: str, bits: int
) -> dict:
    """Compare on `prompts` prompts, with Specter's experts in `memory`. store: of `checkpoint`; it gets a draft."""
    wide = prepare(_widened(checkpoint, work / "float32"), work / "store-float32", read_info(store).expert_format)
    results = {}
    for dtype, each in (("as it is", store), ("float32", wide)):
        build_draft(each, read_info(each), bits)
        results[dtype] = compare(each, prompts, tokens, memory, bits)
    shutil.rmtree(wide)
    rows = [_row(dtype, prompts, partings) for dtype, (partings, _) in results.items()]
    print_table(f"{name}: greedy replies of {tokens} tokens, {memory}, {bits}-bit draft", rows)
    return {"benchmark": "specter-greedy", "model": name, "machine": machine(), "prompts": prompts, "tokens": tokens,
            "expert_memory": memory, "draft_bits": bits,
            "activations": {dtype: {"partings": [asdict(p) for p in partings], "accepted_per_window": accepted}
                            for dtype, (partings, accepted) in results.items()}}  # fmt: skip


def compare(store: Path, prompts: int, tokens: int, memory: str, bits: int) -> tuple[list[Parting], float]:
    """(where replies part, draft tokens accepted of a window on average)."""
    from engine.train.prompts import make_prompts

    config = EngineConfig(str(store), "100%", 512, prefetch="none", device="cpu", draft_bits=bits)
    greedy = GenerationConfig(max_tokens=tokens, temperature=0)
    with Engine(config) as engine:
        asked = [encode(engine, prompt.turns[0]) for prompt in make_prompts(prompts, seed=11)]
        wanted = [said(engine, prompt, greedy) for prompt in asked]
        engine.configure(mode=Mode.SPECTER, prefetch="gate", depth=6, expert_memory=memory)
        got, accepted = [], []
        for prompt in asked:
            got.append(said(engine, prompt, greedy))
            accepted.append(engine.stats().mean_accepted or 0.0)
        engine.configure(mode=Mode.ON_DEMAND, prefetch="none", expert_memory="100%")
        replies = enumerate(zip(asked, got, wanted, strict=True))
        partings = [_parting(engine, i, *reply) for i, reply in replies if reply[1] != reply[2]]
    return partings, sum(accepted) / len(accepted)


def _parting(engine: Engine, number: int, prompt: list[int], got: list[int], wanted: list[int]) -> Parting:
    at = next(i for i, (a, b) in enumerate(zip(got, wanted)) if a != b)
    engine.reset()
    row = engine.force(prompt, wanted[: at + 1])[at]
    return Parting(number, at, float(row[wanted[at]] - row[got[at]]))


def _widened(checkpoint: Path, destination: Path) -> Path:
    """A copy of `checkpoint` in float32."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(checkpoint, destination, ignore=shutil.ignore_patterns("*.safetensors*"))
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).save_pretrained(destination)
    return destination


def _row(dtype: str, prompts: int, partings: list[Parting]) -> dict:
    margins = sorted(parting.margin for parting in partings)
    return {"activations": dtype, "equal": f"{prompts - len(partings)} of {prompts}",
            "margins where they part": ", ".join(f"{margin:.4f}" for margin in margins)}  # fmt: skip
