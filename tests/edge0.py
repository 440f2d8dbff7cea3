"""Random heads and LoRAs for tiny models, and what Edge0 mode is to compute with them, in plain transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.forecast.heads import HeadFile, write_heads
from engine.forecast.law import find_law
from engine.forecast.prerouter import decoder_layer
from engine.model.lora import Lora, write_lora
from engine.model.router import Routing, install
from engine.model.skeleton import cache_argument, find_experts, find_router, top_k
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
    routers, trained, law, experts = _parts(model, heads)
    path = StudentPath(trained, {layer + 1 for layer in trained}, law, experts)
    install(model, routers, path, PathSeam)
    ids = torch.tensor([[*prompt, *reply[:-1]]])
    targets = torch.arange(len(prompt) - 1, ids.shape[1])
    path.begin(Turns.of_targets([targets], ids.shape[1]), record=False)
    return model(input_ids=ids).logits[0, targets].float()


class FedByPrompt:
    """Forecasts at the last position of whatever forward ran, a prompt's too, from the experts of the last two positions."""

    def __init__(self, heads: dict[int, TrainedHead], law, experts: int) -> None:
        self.heads, self.law, self.experts = heads, law, experts
        self.ready: dict[int, Routing] = {}
        self.made: dict[int, Routing] = {}
        self.ran: dict[int, list[list[int]]] = {}

    def routing(self, layer: int) -> Routing | None:
        return self.ready.get(layer)

    def on_routed(self, layer: int, moe_input: torch.Tensor, ids: torch.Tensor) -> None:
        if layer in self.heads:
            ran = self.ran.setdefault(layer, [])
            ran += ids.tolist()
            seen = torch.zeros(2, self.experts)
            for row, chosen in zip(seen, [ran[-1], *ran[-2:-1]]):
                row[chosen] = 1
            m = moe_input.reshape(len(ids), -1)[-1]
            logits = self.heads[layer](torch.cat([m, *seen]))[None]
            self.made[layer + 1] = Routing(logits, *self.law.select(logits))


@torch.no_grad()
def fed_logits(model: torch.nn.Module, heads: HeadFile, prompt: list[int], reply: list[int]) -> torch.Tensor:
    """Logits [len(reply), V], token by token, where the end of the prompt feeds the heads: Edge0's rule for its 8B model."""
    routers, trained, law, experts = _parts(model, heads)
    path = FedByPrompt(trained, law, experts)
    install(model, routers, path)
    rows, cache = [], None
    for piece in [prompt, *([token] for token in reply[:-1])]:
        result = model(input_ids=torch.tensor([piece]), use_cache=True, **{cache_argument(model): cache})
        rows.append(result.logits[0, -1].float())
        cache, path.ready, path.made = result.past_key_values, path.made, {}
    return torch.stack(rows)


def _parts(model: torch.nn.Module, heads: HeadFile):
    """Paths of the routers, the heads by MoE layer, the routing law, and the number of experts of a transformers model."""
    paths = list(find_experts(model))
    routers = [find_router(model, path) for path in paths]
    layer_of = {decoder_layer(path): layer for layer, path in enumerate(paths)}
    law = find_law(model.get_submodule(routers[-1]), model.config.hidden_size, top_k(model, paths[0]), "test")
    trained = {layer_of[n]: TrainedHead(*(parts[p] for p in ("fc1", "fc2", "linear_init")))
               for n, parts in heads.tensors.items()}  # fmt: skip
    return routers, trained, law, model.get_submodule(paths[0]).num_experts
