"""Held-out chats answer prompts that training never sees: the recipe's own list, far behind the part it trains on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.config import GenerationConfig
from engine.decode.text import split_reasoning
from engine.engine import Engine
from engine.eval.scoring import Turn
from engine.train.chats import Chat, generate_chats
from engine.train.prompts import Prompt, make_prompts
from engine.train.recipe import Recipe

# The recipe trains on the first shards x 160 prompts of its list. The list for a greater count begins with that for a
# smaller one and has no first message twice, so a prompt from here on is in no training chat.
FIRST_HELD_OUT = 8000
_RECIPE = Recipe()
MAX_NEW = _RECIPE.max_new  # tokens of a reply, as in the chats trained on
_SLOTS = 16  # replies generated at once


def held_out_prompts(count: int) -> list[Prompt]:
    """Half of them are to be answered greedily and half at temperature 0.7."""
    return make_prompts(FIRST_HELD_OUT + count, _RECIPE.seed)[FIRST_HELD_OUT:]


def held_out_chats(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, max_new: int = MAX_NEW
) -> list[list[Turn]]:
    """`count` chats with a dense llama's replies; `seed` is that of the sampled half."""
    prompts = held_out_prompts(count)
    made = generate_chats(teacher, tokenizer, prompts, max_new=max_new, top_k=_RECIPE.top_k, slots=_SLOTS, seed=seed)
    return [turns_of(chat) for chat in made]


def engine_chats(engine: Engine, count: int, seed: int, max_new: int = MAX_NEW) -> list[list[Turn]]:
    """The same prompts, answered by the model in `engine` as it is configured."""
    chats = []
    for prompt in held_out_prompts(count):
        generation = GenerationConfig(max_tokens=max_new, temperature=prompt.temperature, seed=seed)
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        turns: list[Turn] = []
        for said in prompt.turns:
            messages.append({"role": "user", "content": said})
            chunks = list(engine.chat(messages, generation))
            reply = [token for chunk in chunks for token in chunk.token_ids]
            turns.append(Turn(engine.encode_chat(messages), reply))
            if chunks[-1].finish_reason != "stop":  # cut off: there is nothing sensible to ask next
                break
            text = "".join(chunk.text for chunk in chunks)
            opened = engine.opens_reasoning(messages)
            messages.append({"role": "assistant", "content": split_reasoning(text, opened)[1]})
        chats.append(turns)
    return chats


def turns_of(chat: Chat) -> list[Turn]:
    """A chat's replies, each with all that was said before it. A reply is a run of adjacent targets."""
    ids, turns, begin = chat.ids.tolist(), [], 0
    targets = chat.targets.tolist()
    for i, at in enumerate(targets, start=1):
        if i == len(targets) or targets[i] != at + 1:
            first = targets[begin] + 1
            turns.append(Turn(ids[:first], ids[first : at + 2]))
            begin = i
    return turns


def cached(path: Path, make: Callable[[], list[list[Turn]]]) -> list[list[Turn]]:
    """The chats in the file `path`, which is made when it is not there. It appears only when it is complete."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps([[asdict(turn) for turn in chat] for chat in make()]), encoding="utf-8")
        partial.replace(path)
    return [[Turn(**turn) for turn in chat] for chat in json.loads(path.read_text(encoding="utf-8"))]
