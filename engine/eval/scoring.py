"""A model is scored by forcing tokens through its decode path, so that a score sees all that a reply would.

In edge0 mode the forecast routes single-token forwards only and never the prefill: a forward over a whole text would
score another model than the one that answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.eval.choice_sets import Item
from engine.model.skeleton import cache_argument


class Force(Protocol):
    """Forces a reply: logits [len(reply_ids), V] fp32 on the CPU, each row given the prompt and the reply before it."""

    def __call__(self, prompt_ids: list[int], reply_ids: list[int]) -> Tensor: ...


@dataclass(frozen=True)
class Turn:
    """Token ids of one reply and of everything before it."""

    prompt: list[int]
    reply: list[int]


@dataclass(frozen=True)
class ChatScore:
    """Over `tokens` reply tokens of `chats` chats: the mean KL(reference ‖ model) in nats over the whole vocabulary, the
    share of positions with the same likeliest token, and the perplexity of the replies, the reference's own beside it.

    The errors are standard errors with chats as the units; None for a single chat.
    """

    kl: float
    kl_error: float | None
    top1: float
    top1_error: float | None
    perplexity: float
    perplexity_error: float | None
    reference_perplexity: float
    tokens: int
    chats: int


@dataclass(frozen=True)
class ChoiceScore:
    """A set's accuracy with its 95 % interval, and the share of its items on which the model chose what the reference
    chose."""

    name: str
    items: int
    chance: float
    reference: float
    accuracy: float
    low: float
    high: float
    alike: float


def force_dense(model: nn.Module) -> Force:
    """Forces through a transformers model on the CPU that has no mode to distinguish: a reply in one forward.

    The last prompt's cache is kept, since the items of a set have the same prompt.
    """
    from transformers import DynamicCache

    known: list[int] = []
    cache = first = None

    @torch.inference_mode()
    def force(prompt_ids: list[int], reply_ids: list[int]) -> Tensor:
        nonlocal known, cache, first
        if prompt_ids != known:
            cache = DynamicCache(config=model.config)
            first = run(prompt_ids, 1)
            known = list(prompt_ids)
        if len(reply_ids) == 1:
            return first
        rows = torch.cat([first, run(reply_ids[:-1], len(reply_ids) - 1)])
        for layer in cache.layers:
            layer.crop(1 - len(reply_ids))
        return rows

    def run(ids: list[int], rows: int) -> Tensor:
        past = {cache_argument(model): cache}
        kept = torch.arange(len(ids) - rows, len(ids))  # not a number: see engine/decode/plain.py
        return model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=kept, **past).logits[0].float()

    return force


# -- chats -----------------------------------------------------------------------------------------------------------


def record(force: Force, chats: Sequence[list[Turn]], directory: Path, done: Callable[[], None]) -> None:
    """Keep the reference's log-probabilities, a file a chat: 4 bytes for each reply token and each vocabulary entry.

    On disk, since the reference of a large model cannot be in memory beside the model that is scored.
    `done` is called after each chat.
    """
    for index, chat in enumerate(chats):
        kept = {str(i): force(turn.prompt, turn.reply).log_softmax(-1) for i, turn in enumerate(chat)}
        save_file(kept, _record_of(directory, index))
        done()


def score_chats(force: Force, chats: Sequence[list[Turn]], directory: Path, done: Callable[[], None]) -> ChatScore:
    """Score `force` on the chats whose reference `record` kept in `directory`."""
    sums = []  # of a chat: tokens, KL, agreements, negative log-likelihood, the reference's
    for index, chat in enumerate(chats):
        kept, total = load_file(_record_of(directory, index)), torch.zeros(5, dtype=torch.float64)
        for i, turn in enumerate(chat):
            log_p, log_q = kept[str(i)], force(turn.prompt, turn.reply).log_softmax(-1)
            said = torch.tensor(turn.reply)[:, None]
            total += torch.stack([
                torch.tensor(float(len(turn.reply))),
                (log_p.exp() * (log_p - log_q)).sum(),
                (log_p.argmax(-1) == log_q.argmax(-1)).sum(),
                -log_q.gather(1, said).sum(),
                -log_p.gather(1, said).sum(),
            ])  # fmt: skip
        sums.append(total)
        done()
    tokens, *measured = torch.stack(sums).T
    (kl, kl_error), (top1, top1_error), (loss, loss_error), (own, _) = (ratio(values, tokens) for values in measured)
    perplexity = math.exp(loss)
    return ChatScore(
        kl=kl, kl_error=kl_error, top1=top1, top1_error=top1_error, perplexity=perplexity,
        perplexity_error=None if loss_error is None else perplexity * loss_error,  # first order: d exp(x) = exp(x) dx
        reference_perplexity=math.exp(own), tokens=int(tokens.sum()), chats=len(chats),
    )  # fmt: skip


def ratio(values: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """(sum of `values` / sum of `counts`, its standard error) over independent clusters, both [clusters].

    The linearised variance of a ratio estimator (Cochran, Sampling Techniques, 1977, chapter 6): tokens of one chat
    resemble each other, so the chats are what varies independently. The error is None for a single cluster.
    """
    clusters = len(values)
    estimate = float(values.sum() / counts.sum())
    if clusters < 2:
        return estimate, None
    variance = ((values - estimate * counts) ** 2).sum() * clusters / (clusters - 1)
    return estimate, float(variance.sqrt() / counts.sum())


def _record_of(directory: Path, index: int) -> Path:
    return directory / f"{index:05d}.safetensors"


# -- multiple choice -------------------------------------------------------------------------------------------------


def choose(force: Force, items: Iterable[tuple[list[int], list[list[int]]]], done: Callable[[], None]) -> list[int]:
    """The option with the greatest log-likelihood of each item, given as the token ids of its prompt and options."""
    chosen = []
    for prompt, options in items:
        scores = log_likelihoods(force, prompt, options)
        chosen.append(max(range(len(scores)), key=scores.__getitem__))
        done()
    return chosen


def log_likelihoods(force: Force, prompt: list[int], options: list[list[int]]) -> list[float]:
    """log P(option | prompt) of each option, summed over its tokens: not normalised by length.

    Options that differ in their last tokens share what was forced: a row depends on the tokens before it alone.
    """
    forced: list[tuple[list[int], Tensor]] = []
    scores = [0.0] * len(options)
    for index in sorted(range(len(options)), key=lambda i: -len(options[i])):
        ids = options[index]
        rows = next((rows for other, rows in forced if other[: len(ids) - 1] == ids[:-1]), None)
        if rows is None:
            rows = force(prompt, ids).log_softmax(-1)
            forced.append((ids, rows))
        scores[index] = float(rows[: len(ids)].gather(1, torch.tensor(ids)[:, None]).sum())
    return scores


def score_choices(name: str, items: Sequence[Item], chosen: list[int], reference: list[int]) -> ChoiceScore:
    """Figures of one set from the options that the model and the reference chose."""
    right = sum(choice == item.answer for choice, item in zip(chosen, items))
    low, high = wilson(right, len(items))
    return ChoiceScore(
        name=name,
        items=len(items),
        chance=sum(1 / len(item.options) for item in items) / len(items),
        reference=sum(choice == item.answer for choice, item in zip(reference, items)) / len(items),
        accuracy=right / len(items),
        low=low,
        high=high,
        alike=sum(a == b for a, b in zip(chosen, reference)) / len(items),
    )


def wilson(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The interval of a share (Wilson 1927); z: the normal quantile, by default of 95 %."""
    share, scale = hits / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)
