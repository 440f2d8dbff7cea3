"""What the engine's tests share: an engine with so many slots, its greedy tokens, and the weights a store stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine import Engine, EngineConfig, GenerationConfig
from engine.decode.reuse import Conversation
from engine.store.layout import StoreInfo, read_info

REPETITION = 1.5  # punished: random models repeat themselves, and would visit few of their experts
PROMPT = [9, 100, 31, 7, 250, 12, 44, 180, 3, 77, 160, 23, 5]


def open_engine(
    store: Path, slots: int | None = None, prefetch: str = "none", context: int = 256, chunk: int = 0, **settings
) -> Engine:
    """An engine with `slots` expert slots; None: all experts resident. `chunk`: prefill chunk length, if not the usual."""
    memory = "100%" if slots is None else slots * read_info(store).layout.record_bytes
    engine = Engine(EngineConfig(str(store), memory, context, prefetch=prefetch, **settings))
    if chunk:
        engine._conversation = Conversation(streamed(engine).config, chunk)
    return engine


def greedy(engine: Engine, prompt: list[int] = PROMPT, tokens: int = 12) -> list[int]:
    """Token ids of a greedy reply, the end token included."""
    generation = GenerationConfig(max_tokens=tokens, temperature=0, repetition_penalty=REPETITION)
    return [token for chunk in engine.complete(prompt, generation) for token in chunk.token_ids]


def streamed(engine: Engine) -> torch.nn.Module:
    """The transformers model inside an engine, its experts streamed."""
    return engine._model


@contextmanager
def out_of_luck(engine: Engine) -> Iterator[None]:
    """Inside, the fourth forward raises RuntimeError in the second MoE layer, with the first one's keys and values cached."""
    calls = []

    def fail(*_) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of luck")

    hook = streamed(engine).get_submodule(engine.info.layers[1]).register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def reference(checkpoint: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The checkpoint in plain transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()


def reference_greedy(model: torch.nn.Module, prompt: list[int] = PROMPT, tokens: int = 12) -> list[int]:
    """Token ids that transformers' own greedy decoding adds to `prompt`."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, repetition_penalty=REPETITION
    )
    return output[0, len(prompt) :].tolist()


def stored_experts(store: Path) -> Iterator[tuple[str, int, dict[str, torch.Tensor]]]:
    """(module path, expert, matrix or bias name -> fp32 tensor, matrices as [out, in]) of every record of a store."""
    info: StoreInfo = read_info(store)
    records = torch.frombuffer(bytearray((store / info.experts_file).read_bytes()), dtype=torch.uint8)
    for key, record in enumerate(records.view(-1, info.layout.record_bytes)):
        views, tensors = info.layout.views(record), {}
        for name, form in info.layout.formats.items():
            tensors[name] = form.decode({suffix: views[name + suffix] for suffix in form.tensors()})
        tensors |= {name: views[name].float() for name in views if name.endswith("_bias")}
        yield info.layers[key // info.experts], key % info.experts, tensors


def use_stored_experts(model: torch.nn.Module, store: Path) -> torch.nn.Module:
    """Give a plain transformers model the experts a store stands for: what quantising makes of them."""
    for path, expert, tensors in stored_experts(store):
        module = model.get_submodule(path)
        for name, tensor in tensors.items():
            matrix = name.removesuffix("_bias")
            target = getattr(module, f"{matrix}_proj" + ("_bias" if matrix != name else "")).data[expert]
            target.copy_(tensor.t() if tensor.ndim == 2 and module.is_transposed else tensor)
    return model


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of what was wanted."""
    return float((got - wanted).norm() / wanted.norm())
