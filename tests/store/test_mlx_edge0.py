"""A checkpoint in Edge0's published layout, with its heads and its LoRA, computes what its definition says."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from engine import Mode, prepare
from engine.forecast.heads import HeadFile
from engine.model.lora import Lora
from engine.store.layout import read_info
from tests.edge0 import edge0_logits, fed_logits, merge, put_heads
from tests.store.mlx_checkpoint import published_name, write_mlx
from tests.streaming import PROMPT, error_of, open_engine

REPLY = [17, 201, 33, 8, 150, 91, 260, 14, 77, 301]


def publish_lora(directory, kind: str, model: torch.nn.Module) -> Lora:
    """Write a LoRA in the published layout on every resident linear of the attentions and shared experts."""
    generator, pairs, tensors = torch.Generator().manual_seed(3), {}, {}
    for name, module in model.named_modules():
        shared = "shared_expert." in name or "shared_experts." in name
        if type(module) is not torch.nn.Linear or not ("attn" in name or shared):
            continue
        a = (torch.randn(4, module.in_features, generator=generator) * module.in_features**-0.5).half()
        b = (torch.randn(module.out_features, 4, generator=generator) * 0.2).half()
        pairs[name] = a, b
        tensors |= {published_name(kind, f"{name}.lora_{half}"): t for half, t in zip("AB", (a, b))}
    assert pairs
    about = json.dumps({"kind": "lora", "r": "4", "alpha": "8", "K": "2", "format_version": "1"})
    save_file(tensors, directory / "lora_edge0_35b.safetensors", metadata={"__metadata__": about})
    return Lora(pairs, 2.0, {})


@pytest.mark.parametrize(("kind", "slots"), [
    ("qwen3_5_moe", None), ("qwen3_5_moe", 6), ("bailing_hybrid", None), ("bailing_hybrid", 6), ("deepseek_v3", 8),
])  # fmt: skip
def test_heads_and_lora_of_a_published_checkpoint(kind, slots, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.kernels.int4.native_packing", lambda: "plain")
    directory, model = write_mlx(kind, tmp_path / kind)
    for path in directory.glob("*_edge0_tiny.safetensors"):
        path.unlink()
    lora = publish_lora(directory, kind, model)
    store = prepare(directory, tmp_path / "store", top_k=2)
    info = read_info(store)
    assert info.top_k == 2
    model.config.num_experts_per_tok = 2
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 2
    heads = put_heads(store)
    owners = sorted(heads.tensors)
    said = edge0_logits
    if kind != "deepseek_v3":  # published heads do not list their consumers; each of the two models has a rule of its own
        about = {"kind": "prerouter", "K": "2", "owners": str(owners)}
        tensors = {f"layers.{n}.{part}.weight": t for n, parts in heads.tensors.items() for part, t in parts.items()}
        save_file(tensors, store / "prerouter_test.safetensors", metadata={"__metadata__": json.dumps(about)})
    if kind == "qwen3_5_moe":  # only layers with a head of their own are routed
        heads = HeadFile({n: parts for n, parts in heads.tensors.items() if n + 1 in owners}, {})
    if kind == "bailing_hybrid":  # the end of the prompt feeds the heads
        said = fed_logits
    with open_engine(store, slots, mode=Mode.EDGE0) as engine:
        got = engine.force(PROMPT, REPLY)
        assert engine.stats().lora and engine.stats().dropped == 0
        engine.configure(lora=False)
        without = engine.force(PROMPT, REPLY)
    wanted = said(copy.deepcopy(model), heads, PROMPT, REPLY)
    assert error_of(without, wanted) < 1e-3
    merge(model, lora)
    assert error_of(got, said(model, heads, PROMPT, REPLY)) < 1e-2  # the side path is computed in fp16
    assert error_of(got, without) > 0.05
