"""What a model's tokens are: their number, their tokenizer, and which of them end a reply."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from engine.errors import StoreError

GENERATION = "generation_config.json"


def vocabulary_size(config) -> int:
    """Length of a row of logits of a model with this transformers configuration."""
    return config.get_text_config(decoder=True).vocab_size


def load_tokenizer(directory: Path):
    """The transformers tokenizer in `directory`. Raises StoreError when there is none that can be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{directory} has no tokenizer that can be loaded ({str(error).splitlines()[0]}); prepare it from a "
                         "checkpoint that has its tokenizer files") from error  # fmt: skip


def end_ids(directory: Path, model: nn.Module, tokenizer) -> set[int]:
    """Token ids that end a reply: those of generation_config.json, else of the model's config, and the tokenizer's.

    Raises StoreError when that file is damaged.
    """
    from transformers import GenerationConfig

    ends = None
    if (directory / GENERATION).is_file():
        try:
            ends = GenerationConfig.from_pretrained(directory).eos_token_id
        except (OSError, ValueError) as error:
            raise StoreError(f"{directory / GENERATION} cannot be read ({str(error).splitlines()[0]}): prepare the model "
                             "again") from error  # fmt: skip
    if ends is None:
        ends = getattr(model.generation_config, "eos_token_id", None)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return {*ends, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
