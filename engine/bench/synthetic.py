"""A synthetic store has a real model's shapes and random weights: speed is measured on it, never text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.memory.kv import kv_bytes
from engine.model.skeleton import build_skeleton, experts_shape, find_experts, top_k
from engine.store.layout import EXPERTS_FILE, RESIDENT_FILE, RecordLayout, StoreInfo, write_info


@dataclass(frozen=True)
class Shape:
    """A transformers configuration by its class's model type and the arguments that give it a published model's
    shape."""

    model_type: str
    arguments: dict


SHAPES = {
    # allenai/OLMoE-1B-7B: 16 layers, 64 experts, top-8, hidden 2048, expert width 1024
    "olmoe-7b": Shape("olmoe", dict(num_hidden_layers=16, hidden_size=2048, intermediate_size=1024, num_experts=64,
                                    num_experts_per_tok=8, num_attention_heads=16, num_key_value_heads=16,
                                    vocab_size=50304, max_position_embeddings=4096)),
}  # fmt: skip


def write_synthetic(name: str, directory: Path, experts: str) -> Path:
    """Write the store of shape `name` with random weights in format `experts` and return its directory.

    Records are cut from one random block at shifting offsets: as incompressible as random ones, much faster to make.
    """
    from transformers import CONFIG_MAPPING

    shape = SHAPES[name]
    config = CONFIG_MAPPING[shape.model_type](**shape.arguments, dtype="bfloat16")
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    _write_tokenizer(directory, config.vocab_size)
    model = build_skeleton(config, torch.bfloat16)
    modules = find_experts(model)
    size = experts_shape(modules)
    packing = int4.native_packing()
    formats = {n: MatrixFormat.choose(experts, s, packing) for n, s in size.matrices().items()}
    layout = RecordLayout.make(formats, size.biases())
    generator = torch.Generator().manual_seed(0)
    resident = {}
    for key, tensor in model.state_dict().items():
        if key.rpartition(".")[0] in modules or (config.tie_word_embeddings and key == "lm_head.weight"):
            continue
        resident[key] = _random(tensor, key, generator)
    save_file(resident, directory / RESIDENT_FILE, metadata={"format": "pt"})
    _write_records(directory / EXPERTS_FILE, layout, size, len(modules) * size.experts, generator)
    per_token, fixed = kv_bytes(model)
    write_info(directory, StoreInfo(
        model_type=config.model_type, architecture=type(model).__name__, layers=tuple(modules), experts=size.experts,
        top_k=top_k(model, next(iter(modules))), hidden=size.hidden, expert_format=experts, layout=layout,
        resident_bytes=(directory / RESIDENT_FILE).stat().st_size, kv_bytes_per_token=per_token, kv_bytes_fixed=fixed,
        quantised_share=0.0, source=f"synthetic {name}", source_sha256="synthetic",
    ))  # fmt: skip
    return directory


def _write_tokenizer(directory: Path, vocabulary: int) -> None:
    """One word a token: enough for an engine that must have a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(directory)


def _random(tensor: torch.Tensor, key: str, generator: torch.Generator) -> torch.Tensor:
    """Weights as a trained model's are scaled: rows of unit gain, norms of one."""
    if tensor.ndim < 2:
        return (
            torch.ones(tensor.shape, dtype=tensor.dtype)
            if "norm" in key
            else torch.zeros(tensor.shape, dtype=tensor.dtype)
        )
    return torch.randn(tensor.shape, generator=generator).mul_(tensor.shape[-1] ** -0.5).to(tensor.dtype)


def _write_records(path: Path, layout: RecordLayout, size, count: int, generator: torch.Generator) -> None:
    matrices = {n: torch.randn(s, generator=generator) * s[1] ** -0.5 for n, s in size.matrices().items()}
    template = layout.views(layout.encode({**matrices, **{n: torch.zeros(b) for n, b in size.biases().items()}}))
    spans = [
        (field.offset, template[field.name].contiguous().view(torch.uint8).flatten().numpy()) for field in layout.fields
    ]
    with path.open("wb") as file:
        for index in range(count):
            record = np.zeros(layout.record_bytes, dtype=np.uint8)
            for offset, block in spans:  # shift by whole rows of 64 bytes, so that every number stays a number
                record[offset : offset + block.size] = np.roll(block, 64 * (index * 31 + 7))
            file.write(record)
