"""Plain decoding is a generator: prefill the prompt in chunks, then one forward a token until something says stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn

from engine.decode.reuse import Conversation
from engine.decode.sampling import Sampler
from engine.model.skeleton import cache_argument


class Stopped(Exception):  # noqa: N818 - not an error: the person asked for it
    """The request was stopped during prefill."""


@torch.inference_mode()
def forward(model: nn.Module, conversation: Conversation, ids: list[int], every: bool = False) -> torch.Tensor:
    """Run `ids` on top of the cache; logits [1, V] of the last one, or [len(ids), V] of every one.

    Inference mode is entered here and not around a loop: a generator would carry it into its consumer's code.
    """
    device = next(model.parameters()).device
    past = {cache_argument(model): conversation.cache}
    # Named by their positions, which copies them. The last one as a slice keeps the strides of all: a product of one such row
    # makes torch copy and reorder the whole vocabulary's weights in bf16 on the CPU, up to a second and 200 MB for 50k tokens.
    kept = torch.arange(0 if every else len(ids) - 1, len(ids), device=device)
    return model(input_ids=torch.tensor([ids], device=device), use_cache=True, logits_to_keep=kept, **past).logits[0]


def prefill(
    model: nn.Module,
    conversation: Conversation,
    prompt: list[int],
    stop: threading.Event,
    on_forward: Callable[[int, bool], None],
    fresh: int = 0,
) -> tuple[torch.Tensor, int]:
    """Bring the cache to the whole prompt: (logits [1, V] of its last token, tokens that were reused).

    The last `fresh` tokens are computed even if they are known. on_forward(n, False) is called before each forward of n tokens.
    Raises Stopped between chunks once `stop` is set.
    """
    logits = conversation.resume(prompt, fresh)
    reused = len(conversation.ids)
    if logits is None:
        for piece in conversation.pieces(prompt):
            if stop.is_set():
                raise Stopped
            on_forward(len(piece), False)
            logits = forward(model, conversation, piece)
            conversation.append(piece, prefill=True)
        conversation.prompt_done(prompt, logits)
    return logits, reused


def decode(
    model: nn.Module,
    conversation: Conversation,
    logits: torch.Tensor,
    sampler: Sampler,
    history: list[int],
    on_forward: Callable[[int, bool], None],
) -> Iterator[int]:
    """Yield token ids without end, the first from `logits`. `history` (the prompt) grows with them; on_forward(1, True) is
    called before each forward."""
    while True:
        token = sampler.choose(logits, history)
        history.append(token)
        yield token
        on_forward(1, True)
        logits = forward(model, conversation, [token])
        conversation.append([token], prefill=False)
