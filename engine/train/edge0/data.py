"""Training data is chats with the teacher's distribution at every reply token, whoever the teacher was.

Chats come from a JSON Lines file of conversations, from shards made by the default model's recipe (whose teacher is the dense
original), or are written by the model itself. Where no distribution is known yet, the model's own exact path is the teacher.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from engine.config import GenerationConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.train.chats import Chat, load_chats, save_chats
from engine.train.prompts import make_prompts

TOP_K = 64  # of the teacher's distribution, kept at each position
_SHARD = 64  # chats
Messages = list[dict[str, str]]


def read_jsonl(path: Path) -> Iterator[Messages]:
    """The conversations of a file with one JSON list of {"role", "content"}, or {"messages": [...]}, a line.

    Raises ConfigError naming the line.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            messages = value["messages"] if isinstance(value, dict) else value
            if any({"role", "content"} - message.keys() for message in messages):
                raise KeyError("role or content")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: no conversation ({error}); a line is a JSON list of "
                              '{"role": ..., "content": ...}') from error  # fmt: skip
        if any(message["role"] == "assistant" for message in messages):
            yield messages


def tokenise(engine: Engine, messages: Messages, limit: int) -> tuple[list[int], list[int]] | None:
    """Token ids of a conversation, and the positions that predict a reply token; None when it is longer than `limit`.

    A reply is found by rendering the conversation up to it with and without it.
    """
    ids: list[int] = []
    targets: list[int] = []
    end = engine.tokenizer.eos_token_id
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = engine.encode_chat(messages[:at])
        reply = engine.tokenizer.encode(message["content"], add_special_tokens=False)
        reply += [end] if end is not None else []
        if prompt[: len(ids)] != ids:  # the template drops what earlier replies held, such as their reasoning
            ids, targets = [], []
        targets += range(len(prompt) - 1, len(prompt) + len(reply) - 1)
        ids = prompt + reply
    return (ids, targets) if ids and len(ids) <= limit else None


def generate(engine: Engine, count: int, max_tokens: int, seed: int, say: Callable[[str], None]) -> Iterator[Messages]:
    """Conversations about `count` prompts, replies half greedy and half at temperature 0.7, ended where the context does."""
    for number, prompt in enumerate(make_prompts(count, seed)):
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            if len(engine.encode_chat(messages)) + max_tokens > engine.config.context:
                break
            wanted = GenerationConfig(max_tokens=max_tokens, temperature=prompt.temperature, seed=seed + number)
            text = "".join(chunk.text for chunk in engine.chat(messages, wanted))
            messages.append({"role": "assistant", "content": text})
        say(f"written {number + 1}/{count} chats")
        if messages[-1]["role"] == "user":
            messages.pop()
        if messages and messages[-1]["role"] == "assistant":
            yield messages


def teach(engine: Engine, ids: list[int], targets: list[int]) -> Chat:
    """A chat with the model's own distribution, by its exact path."""
    wanted = torch.tensor(targets)
    top_ids, top_log_probs = [], []

    def keep(start: int, logits: torch.Tensor) -> None:
        rows = wanted[(wanted >= start) & (wanted < start + len(logits))] - start
        top = logits[rows].float().log_softmax(-1).topk(min(TOP_K, logits.shape[-1]))
        top_ids.append(top.indices.cpu())
        top_log_probs.append(top.values.cpu())

    engine.trace(ids, lambda layer, moe_input, routing: None, keep)
    return Chat(torch.tensor(ids), wanted, torch.cat(top_ids), torch.cat(top_log_probs))


def gather(
    engine: Engine,
    files: list[Path],
    self_generate: int,
    work: Path,
    seed: int,
    max_tokens: int,
    say: Callable[[str], None],
) -> list[Chat]:
    """All chats of `files` and `self_generate` written ones; those that need the model are kept as shards in `work`.

    Raises ConfigError when a file is of no known kind or nothing is left.
    """
    chats: list[Chat] = []
    conversations: list[Messages] = []
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        if path.suffix == ".safetensors":
            chats += load_chats(path)
        elif path.suffix in (".jsonl", ".json"):
            conversations += read_jsonl(path)
        else:
            raise ConfigError(f"{path}: training data is .jsonl conversations or .safetensors shards of chats")
    written = work / "written.jsonl"
    if self_generate:
        if not written.is_file():
            lines = [json.dumps(m) + "\n" for m in generate(engine, self_generate, max_tokens, seed, say)]
            written.write_text("".join(lines), encoding="utf-8")
        conversations += read_jsonl(written)
    for start in tqdm(range(0, len(conversations), _SHARD), desc="teacher", disable=not conversations):
        shard = work / f"taught-{start // _SHARD:03d}.safetensors"
        if not shard.is_file():
            pairs = [tokenise(engine, m, engine.config.context) for m in conversations[start : start + _SHARD]]
            save_chats(shard, [teach(engine, *pair) for pair in pairs if pair is not None])
        chats += load_chats(shard)
    if not chats:
        raise ConfigError("there is nothing to train on: give --data or --self-generate")
    return chats
