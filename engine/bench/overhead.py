"""`bench overhead`: all-resident decoding against plain transformers on the same checkpoint, dtype and tokens, and against itself
while somebody watches, as the app's panels do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.bench.measure import Spread, generate, machine, print_table, speed_up
from engine.config import EngineConfig
from engine.engine import Engine

_LOOK_EVERY = 0.5  # seconds


def run_overhead(name: str, checkpoint: Path, store: Path, repeats: int, tokens: int) -> dict:
    """Alternate the engine, the engine watched, and plain transformers; above 1 means the engine is faster."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    prompt = list(range(100, 132))
    ours: list[float] = []
    watched: list[float] = []
    theirs: list[float] = []
    with Engine(EngineConfig(model=str(store), expert_memory="100%", context=1024, prefetch="none")) as engine:
        engine.settle()
        for _ in range(repeats):
            ours.append(generate(engine, prompt, tokens, warm_up=4).seconds)
            with _watching(engine):
                watched.append(generate(engine, prompt, tokens, warm_up=4).seconds)
            theirs.append(_plain_seconds(plain, prompt, tokens))
    row = {"engine tok/s": Spread.of([1 / s for s in ours]), "transformers tok/s": Spread.of([1 / s for s in theirs]),
           "x transformers": Spread.of(speed_up(theirs, ours)),
           "x itself watched": Spread.of(speed_up(watched, ours))}  # fmt: skip
    print_table(f"{name}: decoding with every expert resident", [row])
    return {"benchmark": "overhead", "model": name, "machine": machine(), "tokens": tokens,
            "engine_seconds_per_token": ours, "watched_seconds_per_token": watched,
            "transformers_seconds_per_token": theirs}  # fmt: skip


@contextmanager
def _watching(engine: Engine) -> Iterator[None]:
    """Meanwhile everything that the app's panels show is asked for twice a second."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_EVERY):
            engine.stats()
            engine.residency()

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@torch.inference_mode()
def _plain_seconds(model, prompt: list[int], tokens: int) -> float:
    """Seconds a token of the plainest loop around a transformers model: forward, argmax, append."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = model(input_ids=torch.tensor([prompt]), cache=cache, use_cache=True, logits_to_keep=1).logits
    token = int(logits[0, -1].argmax())
    began = time.perf_counter()
    for _ in range(tokens):
        logits = model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
    return (time.perf_counter() - began) / tokens
