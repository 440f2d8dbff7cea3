"""What the tests of Specter mode share: stores with drafts, good and bad, and what plain decoding makes of a reply."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from engine import Engine, GenerationConfig
from engine.store.draft import build_draft, draft_bytes, find_draft
from engine.store.layout import read_info
from tests.streaming import PROMPT, REPETITION

GOOD, FAIR, BAD = 4, 3, 2  # bits of the drafts; the last one is of other experts altogether
LONG = [*PROMPT, *range(60, 72)]  # over the sliding windows
GREEDY = GenerationConfig(max_tokens=16, temperature=0, repetition_penalty=REPETITION)
NEAR_TIE = 1e-2  # difference of two logits within which rounding may decide


def drafted_copy(store: Path, destination: Path, *bits: int) -> Path:
    """A copy of `store` at `destination` with drafts of these bits."""
    shutil.copytree(store, destination)
    for width in bits:
        build_draft(destination, read_info(destination), width)
    return destination


def spoil_draft(store: Path, bits: int, seed: int = 99) -> None:
    """Overwrite a draft of `store` with that of random other experts: valid, of the same size, and wrong throughout."""
    file, generator = find_draft(store, read_info(store), bits), torch.Generator().manual_seed(seed)
    records = []
    for _ in range(file.path.stat().st_size // file.layout.record_bytes):
        tensors = {name: torch.randn(form.shape, generator=generator) * form.shape[1] ** -0.5
                   for name, form in file.layout.formats.items()}  # fmt: skip
        for field in file.layout.fields:
            if field.name.endswith("_bias"):
                tensors[field.name] = torch.randn(field.shape, generator=generator) * 0.1
        records.append(file.layout.encode(tensors).numpy().tobytes())
    file.path.write_bytes(b"".join(records))


def divergence(plain: Engine, prompt: list[int], got: list[int], wanted: list[int]) -> str | None:
    """None if two greedy replies are equal, or part at a near-tie of plain decoding; else where and how they part."""
    if got == wanted:
        return None
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    if at >= min(len(got), len(wanted)):
        return f"{len(got)} tokens where plain decoding says {len(wanted)}: {got} and {wanted}"
    row = plain.force(prompt, wanted[: at + 1])[at]
    for token in {*prompt, *wanted[:at]}:  # as transformers punishes repetition
        row[token] *= REPETITION if row[token] < 0 else 1 / REPETITION
    margin = float(row[wanted[at]] - row[got[at]])
    if margin < NEAR_TIE:
        return None
    return f"token {at} is {got[at]}, not {wanted[at]}; their logits differ by {margin:.4f}"


def memory(directory, slots: int | None, bits: int = GOOD) -> int:
    """Bytes of so many slots and a draft; None: the least that is possible and two slots more."""
    info = read_info(directory)
    return draft_bytes(info, bits) + (info.top_k + 2 if slots is None else slots) * info.layout.record_bytes


def reply(engine, prompt: list[int], config: GenerationConfig = GREEDY, stop=None) -> tuple[list[int], str, str]:
    """(tokens, text, why it ended) of a reply."""
    chunks = list(engine.complete(prompt, config, stop))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
