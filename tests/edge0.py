"""Random heads and LoRAs for tiny models, and what Edge0 mode is to compute with them, in plain transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.forecast.heads import HeadFile, write_heads
from engine.forecast.law import find_law
from engine.forecast.prerouter import decoder_layer
from engine.model.lora import Lora, write_lora
from engine.model.router import install
from engine.model.skeleton import find_experts, find_router, top_k
from engine.store.layout import read_info
from engine.train.edge0.path import PathSeam, StudentPath, TrainedHead, Turns

INNER = 24


def put_heads(store: Path, owners: list[int] | None = None, seed: int = 0, **metadata: str) -> HeadFile:
    """Write random heads for `store`, of the decoder layers `owners` (all that can own one by default)."""
    info = read_info(store)
    layers = [decoder_layer(path) for path in info.layers]
    owners = [n for n in layers if n + 1 in layers] if owners is None else owners
    generator = torch.Generator().manual_seed(seed)
    wide = info.hidden + 2 * info.experts

    def noise(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5 * 2).half()

    tensors = {n: {"fc1": noise(INNER, wide), "fc2": noise(info.experts, INNER), "linear_init": noise(info.experts, wide)}
               for n in owners}  # fmt: skip
    file = HeadFile(tensors, {"consumers": ",".join(str(n + 1) for n in owners), **metadata})
    write_heads(store / "prerouter_test.safetensors", file)
    return file


def put_lora(store: Path, model: torch.nn.Module, rank: int = 4, seed: int = 1, **metadata: str) -> Lora:
    """Write a random LoRA on the attention's linears of `model`."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and "attn" in name:
            a = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
            pairs[name] = a.half(), (torch.randn(module.out_features, rank, generator=generator) * 0.3).half()
    lora = Lora(pairs, 2.0, metadata)
    write_lora(store / "lora_test.safetensors", lora)
    return lora


def merge(model: torch.nn.Module, lora: Lora) -> None:
    """Add the side paths to the weights of a float32 model."""
    for name, (a, b) in lora.pairs.items():
        model.get_submodule(name).weight.data += lora.scale * b.float() @ a.float()


@torch.no_grad()
def edge0_logits(model: torch.nn.Module, heads: HeadFile, prompt: list[int], reply: list[int]) -> torch.Tensor:
    """Logits [len(reply), V] of every reply token by the student path of a plain transformers model, which is changed."""
    paths = list(find_experts(model))
    routers = [find_router(model, path) for path in paths]
    layer_of = {decoder_layer(path): layer for layer, path in enumerate(paths)}
    experts = model.get_submodule(paths[0]).num_experts
    law = find_law(model.get_submodule(routers[-1]), model.config.hidden_size, top_k(model, paths[0]), "test")
    trained = {layer_of[n]: TrainedHead(*(parts[p] for p in ("fc1", "fc2", "linear_init")))
               for n, parts in heads.tensors.items()}  # fmt: skip
    path = StudentPath(trained, {layer + 1 for layer in trained}, law, experts)
    install(model, routers, path, PathSeam)
    ids = torch.tensor([[*prompt, *reply[:-1]]])
    targets = torch.arange(len(prompt) - 1, ids.shape[1])
    path.begin(Turns.of_targets([targets], ids.shape[1]), record=False)
    return model(input_ids=ids).logits[0, targets].float()
