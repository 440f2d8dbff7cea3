"""A shard of chats holds token ids and, for every position that predicts a reply token, the teacher's
distribution.

The distribution is kept as the log-probabilities of the teacher's `top_k` likeliest tokens; what is left of
the probability is the tail. It comes for free with the sampling, so training needs no second forward of the
teacher.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from engine.train.prompts import Prompt

_MARK = "\u241e"


@dataclass
class Chat:
    """One chat. `ids` [tokens]; `targets` [n] are the positions whose next token is a reply token; `top_ids`
    [n, k] and `top_log_probs` [n, k] describe the teacher's next-token distribution there."""

    ids: Tensor
    targets: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


@dataclass
class Batch:
    """Chats right-padded together. ids [B, T]; positions [n] are the targets in the flattened ids; top_ids and top_log_probs
    [n, k] as in a chat."""

    ids: Tensor
    positions: Tensor
    top_ids: Tensor
    top_log_probs: Tensor

    @staticmethod
    def of(chats: list[Chat]) -> Batch:
        ids = pad_sequence([chat.ids for chat in chats], batch_first=True)
        positions = torch.cat([chat.targets + row * ids.shape[1] for row, chat in enumerate(chats)])
        return Batch(ids, positions, torch.cat([c.top_ids for c in chats]), torch.cat([c.top_log_probs for c in chats]))


def save_chats(path: Path, chats: list[Chat]) -> None:
    """Writes a shard; it appears under its name only when it's complete."""
    tensors = {
        "ids": torch.cat([chat.ids for chat in chats]).int(),
        "lengths": torch.tensor([len(chat.ids) for chat in chats]),
        "targets": torch.cat([chat.targets for chat in chats]).int(),
        "target_counts": torch.tensor([len(chat.targets) for chat in chats]),
        "top_ids": torch.cat([chat.top_ids for chat in chats]).int(),
        "top_log_probs": torch.cat([chat.top_log_probs for chat in chats]).half(),
    }
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary)
    temporary.replace(path)


def load_chats(path: Path) -> list[Chat]:
    shard = load_file(path)
    lengths, counts = shard["lengths"].tolist(), shard["target_counts"].tolist()
    return [
        Chat(ids.long(), targets.long(), top_ids.long(), top_log_probs.float())
        for ids, targets, top_ids, top_log_probs in zip(
            shard["ids"].split(lengths),
            shard["targets"].split(counts),
            shard["top_ids"].split(counts),
            shard["top_log_probs"].split(counts),
        )
    ]


class _SlotLayer(DynamicLayer):
    """A cache layer of fixed rows ("slots"), each filled to its own length, that is written in place.

    DynamicLayer would copy all it holds for every new token and for every reply that ends. `ends` [slots]
    holds the position of the token being computed; it is shared by all layers and advanced by their owner.
    """

    def __init__(self, ends: Tensor, heads: int, room: int, width: int):
        super().__init__()
        self.ends = ends
        self.rows = torch.arange(len(ends))
        self.room_keys = torch.zeros(len(ends), heads, room, width)
        self.room_values = torch.zeros(len(ends), heads, room, width)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.room_keys[self.rows, :, self.ends] = key_states[:, :, 0]
        self.room_values[self.rows, :, self.ends] = value_states[:, :, 0]
        filled = int(self.ends.max()) + 1
        return self.room_keys[:, :, :filled], self.room_values[:, :, :filled]

    def keep(self, slots: Tensor, ends: Tensor) -> None:
        """Drops all but some slots; `ends` replaces the shared one."""
        self.ends, self.rows = ends, torch.arange(len(slots))
        self.room_keys, self.room_values = self.room_keys[slots], self.room_values[slots]

    def fill(self, slot: int, keys: Tensor, values: Tensor) -> None:
        self.room_keys[slot, :, : keys.shape[1]] = keys
        self.room_values[slot, :, : values.shape[1]] = values


@dataclass
class _Row:
    """A chat in the making: its ids so far, and for every reply token its position and the teacher's
    distribution."""

    ids: list[int]
    temperature: float
    targets: list[int] = field(default_factory=list)
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    done: bool = False


class _Replier:
    """Lets the teacher answer many rows, at most `slots` at a time; a slot whose reply ended takes the next
    row."""

    def __init__(self, teacher: PreTrainedModel, slots: int, max_new: int, eos: int, top_k: int, seed: int):
        self.teacher, self.slots, self.max_new, self.eos, self.top_k = teacher, slots, max_new, eos, top_k
        self.generator = torch.Generator().manual_seed(seed)

    def _sample(self, logits: Tensor, rows: list[_Row]) -> list[int]:
        """One token per row of logits [rows, vocabulary]; it and its distribution are added to the row."""
        top_logits, top_ids = logits.topk(self.top_k)
        top_log_probs = top_logits - logits.logsumexp(-1, keepdim=True)
        temperature = torch.tensor([row.temperature for row in rows])
        noise = torch.rand(top_ids.shape, generator=self.generator).clamp(1e-9, 1 - 1e-7)
        # Gumbel-max over the kept tokens; at temperature 0 the noise has no weight.
        choice = (top_log_probs - temperature[:, None] * (-noise.log()).log()).argmax(-1, keepdim=True)
        tokens = top_ids.gather(-1, choice)[:, 0].tolist()
        for row, token, ids, log_probs in zip(rows, tokens, top_ids.int(), top_log_probs.half()):
            row.targets.append(len(row.ids) - 1)
            row.kept.append((ids, log_probs))
            row.ids.append(token)
            row.done = token == self.eos
        return tokens

    def _read(self, rows: list[_Row], slots: list[int], cache: DynamicCache) -> list[tuple[int, _Row]]:
        """Runs the rows' ids as one right-padded batch into the slots of the cache and samples their first
        token."""
        longest = max(len(row.ids) for row in rows)
        ids = torch.tensor([row.ids + [self.eos] * (longest - len(row.ids)) for row in rows])
        read = DynamicCache()
        hidden = self.teacher.model(input_ids=ids, cache=read, use_cache=True).last_hidden_state
        last = torch.tensor([len(row.ids) - 1 for row in rows])
        for layer, source in zip(cache.layers, read.layers):
            for i, slot in zip(range(len(rows)), slots):
                layer.fill(slot, source.keys[i], source.values[i])
        self._sample(self.teacher.lm_head(hidden[torch.arange(len(rows)), last]), rows)
        return list(zip(slots, rows))

    @torch.inference_mode()
    def answer(self, rows: list[_Row]) -> None:
        """Appends one reply to every row."""
        config = self.teacher.config
        room = max(len(row.ids) for row in rows) + self.max_new
        slots = min(self.slots, len(rows))
        ends = torch.zeros(slots, dtype=torch.long)
        cache = DynamicCache()
        cache.layers = [
            _SlotLayer(ends, config.num_key_value_heads, room, config.head_dim) for _ in range(config.num_hidden_layers)
        ]
        waiting = sorted(rows, key=lambda row: -len(row.ids))
        active: list[_Row | None] = [None] * slots
        left = [0] * slots
        tokens = torch.zeros(slots, 1, dtype=torch.long)
        while waiting or any(active):
            free = [slot for slot, row in enumerate(active) if row is None]
            # Prompts are read several at a time: reading one costs nearly as much as reading eight.
            if waiting and len(free) >= min(slots, 8):
                for slot, row in self._read([waiting.pop() for _ in free[: len(waiting)]], free, cache):
                    tokens[slot], ends[slot] = row.ids[-1], len(row.ids) - 1
                    left[slot] = self.max_new - 1
                    active[slot] = row if left[slot] and not row.done else None
                continue
            if not waiting and len(free) > len(active) // 4:
                live = torch.tensor([slot for slot, row in enumerate(active) if row is not None])
                ends, tokens = ends[live], tokens[live]
                left, active = [left[slot] for slot in live], [active[slot] for slot in live]
                for layer in cache.layers:
                    layer.keep(live, ends)
            # An idle slot repeats its last token in place; nobody reads the result.
            filled = int(ends.max()) + 1
            mask = (torch.arange(filled) <= ends[:, None])[:, None, None]
            hidden = self.teacher.model(
                input_ids=tokens, attention_mask=mask, position_ids=ends[:, None], cache=cache, use_cache=True
            ).last_hidden_state[:, 0]
            live = [slot for slot, row in enumerate(active) if row is not None]
            sampled = self._sample(self.teacher.lm_head(hidden[live]), [active[slot] for slot in live])
            for slot, token in zip(live, sampled):
                tokens[slot] = token
                ends[slot] += 1
                left[slot] -= 1
                if not left[slot] or active[slot].done:
                    active[slot] = None
                    ends[slot] = 0


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], reply: bool) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)


def _opening(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return _render(tokenizer, [*system, {"role": "user", "content": prompt.turns[0]}], reply=True)


def _next_turn(tokenizer: PreTrainedTokenizerBase, turn: str) -> str:
    """What the template puts between the end-of-turn token of a reply and the next reply."""
    messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
    text = _render(tokenizer, [*messages, {"role": "user", "content": turn}], reply=True)
    return text.split(_MARK, 1)[1].removeprefix(tokenizer.eos_token)


def generate_chats(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    *,
    max_new: int,
    top_k: int,
    slots: int,
    seed: int,
) -> list[Chat]:
    """The teacher answers every turn of every prompt; a chat ends early when a reply reaches `max_new`
    tokens.

    Sampling at a temperature draws from the `top_k` likeliest tokens. Chats come back in the order of
    `prompts`.
    """
    replier = _Replier(teacher, slots, max_new, tokenizer.eos_token_id, top_k, seed)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rows = [_Row(encode(_opening(tokenizer, prompt)), prompt.temperature) for prompt in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        pending = [
            (row, p.turns[turn]) for row, p in zip(rows, prompts) if turn < len(p.turns) and (turn == 0 or row.done)
        ]
        for row, text in pending:
            if turn:
                row.ids += encode(_next_turn(tokenizer, text))
                row.done = False
        if pending:
            replier.answer([row for row, _ in pending])
    return [
        Chat(torch.tensor(row.ids), torch.tensor(row.targets), *(torch.stack(part) for part in zip(*row.kept)))
        for row in rows
    ]
