"""Captured features lie on disk by layer, so that fitting one head needs the memory of one layer, whatever the model's size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.engine import Engine
from engine.model.router import Routing
from engine.train.chats import Chat
from engine.train.edge0.path import Turns


@dataclass(frozen=True)
class Captured:
    """Of every MoE layer at n tokens: MoE inputs [n, H] float16, router logits [n, E] float16, expert ids [n, k] int16.

    chat [n] is the number of the chat a token belongs to, decoded [n] whether it was fed by decoding.
    """

    directory: Path
    chat: Tensor
    decoded: Tensor

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(MoE inputs, router logits, ids) of `layer`."""
        return tuple(
            torch.from_numpy(np.load(self.directory / f"{kind}.{layer}.npy")) for kind in ("m", "logits", "ids")
        )


def capture(engine: Engine, chats: list[Chat], directory: Path) -> Captured:
    """Run `chats` through the model by its own routing and keep what every MoE layer saw. Resumes by doing nothing when
    `directory` is complete for these chats."""
    layers, done = len(engine.info.layers), directory / "chats.npy"
    total = sum(len(chat.ids) for chat in chats)
    chat = torch.repeat_interleave(torch.arange(len(chats)), torch.tensor([len(c.ids) for c in chats]))
    decoded = torch.cat([Turns.of_targets([c.targets], len(c.ids)).decoded[0] for c in chats])
    if done.is_file() and np.array_equal(np.load(done), chat.numpy()):
        return Captured(directory, chat, decoded)
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {"m": (engine.info.hidden, np.float16), "logits": (engine.info.experts, np.float16),
              "ids": (engine.info.top_k, np.int16)}  # fmt: skip
    files = {
        (kind, layer): np.lib.format.open_memmap(
            directory / f"{kind}.{layer}.npy", mode="w+", dtype=dtype, shape=(total, wide)
        )
        for kind, (wide, dtype) in shapes.items()
        for layer in range(layers)
    }
    at = [0] * layers

    def keep(layer: int, moe_input: Tensor, routing: Routing) -> None:
        rows = slice(at[layer], at[layer] + len(moe_input))
        at[layer] += len(moe_input)
        files["m", layer][rows] = moe_input.float().cpu().numpy()
        files["logits", layer][rows] = routing.logits.float().cpu().numpy()
        files["ids", layer][rows] = routing.ids.cpu().numpy()

    for one in chats:
        engine.trace(one.ids.tolist(), keep)
    for file in files.values():
        file.flush()
    np.save(done, chat.numpy())
    return Captured(directory, chat, decoded)
