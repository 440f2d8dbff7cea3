"""The teacher is the dense model of the GGUF, dequantised to float32, with the tokenizer its authors
published.

transformers reads the GGUF. What it leaves out is restored here: the digit splitting that llama.cpp knows as
the `smollm` pre-tokenizer.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast


def sha256(path: Path) -> str:
    """Hex digest of a file, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def load_teacher(gguf_path: Path) -> LlamaForCausalLM:
    """The dense model in float32, in eval mode. Raises ValueError when the file is not a GGUF of a llama
    model."""
    with open(gguf_path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{gguf_path} is not a GGUF file (its first four bytes are not 'GGUF')")
    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"{gguf_path} holds a {model.config.model_type} model; the recipe splits llama models")
    return model.eval().requires_grad_(False)


def load_tokenizer(gguf_path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    fields = GGUFReader(gguf_path).fields
    if fields["tokenizer.ggml.pre"].contents() == "smollm":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = fields["llama.context_length"].contents()
    return tokenizer
