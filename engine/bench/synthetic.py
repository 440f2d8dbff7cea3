"""A synthetic store or checkpoint has a real model's shapes and random weights: speed is measured on it, never text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.forecast.heads import FILE, HeadFile, write_heads
from engine.forecast.prerouter import decoder_layer
from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.memory.kv import kv_bytes
from engine.model.resident import int4_format, quantisable
from engine.model.skeleton import build_skeleton, experts_shape, find_experts, find_router, top_k
from engine.store.layout import EXPERTS_FILE, RecordLayout, StoreInfo, write_info
from engine.store.resident import ResidentFile
from engine.train.edge0.path import TrainedHead

_EMBEDDING = "embed_tokens"
_INNER = 512  # width of Edge0's published heads


@dataclass(frozen=True)
class Shape:
    """A transformers configuration by its class's model type and the arguments that give it a published model's
    shape. resident: format of the other weights."""

    model_type: str
    arguments: dict
    resident: str = "native"

    def first_layers(self, count: int) -> Shape:
        """The same with only the first `count` layers."""
        return replace(self, arguments={**self.arguments, "num_hidden_layers": count})


SHAPES = {
    # allenai/OLMoE-1B-7B: 16 layers, 64 experts, top-8, hidden 2048, expert width 1024
    "olmoe-7b": Shape("olmoe", dict(num_hidden_layers=16, hidden_size=2048, intermediate_size=1024, num_experts=64,
                                    num_experts_per_tok=8, num_attention_heads=16, num_key_value_heads=16,
                                    vocab_size=50304, max_position_embeddings=4096)),
    # Qwen3.6-35B-A3B as Edge0 runs it: 40 layers, 256 experts and a shared one, top-4, hidden 2048, expert width 512
    "qwen-35b": Shape("qwen3_5_moe_text", dict(num_hidden_layers=40, hidden_size=2048, num_experts=256,
                      num_experts_per_tok=4, moe_intermediate_size=512, shared_expert_intermediate_size=512,
                      num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
                      linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=248320,
                      tie_word_embeddings=False, max_position_embeddings=262144), "int4"),
}  # fmt: skip


def write_synthetic(shape: Shape, directory: Path, experts: str) -> Path:
    """Write a store of this shape with random weights, heads included, its experts in format `experts`; its directory.

    Records are cut from one random block at shifting offsets: as incompressible as random ones, much faster to make.
    """
    config = _config(shape)
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
    coded = {p: int4_format(m, packing) for p, m in quantisable(model).items()} if shape.resident == "int4" else {}
    left_out = {f"{path}.weight" for path in coded} | ({"lm_head.weight"} if config.tie_word_embeddings else set())
    plain = {key: tensor for key, tensor in model.state_dict().items()
             if key not in left_out and key.rpartition(".")[0] not in modules}  # fmt: skip
    gates = dict.fromkeys(f"{find_router(model, path)}.weight" for path in modules)
    resident = ResidentFile({key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in plain.items()}, coded)
    with resident.open(directory) as file:
        for key, tensor in plain.items():
            made = _random(tensor, key, generator)
            resident.write(file, key, made)
            if key in gates:
                gates[key] = made
        for path, form in coded.items():
            resident.write(file, f"{path}.weight", _random_codes(form, path, generator))
    _write_heads(directory, list(modules), list(gates.values()), generator)
    _write_records(directory / EXPERTS_FILE, layout, size, len(modules) * size.experts, generator)
    per_token, fixed = kv_bytes(model)
    write_info(directory, StoreInfo(
        model_type=config.model_type, architecture=type(model).__name__, layers=tuple(modules), experts=size.experts,
        top_k=top_k(model, next(iter(modules))), hidden=size.hidden, expert_format=experts, layout=layout,
        resident_bytes=resident.file_bytes, kv_bytes_per_token=per_token, kv_bytes_fixed=fixed,
        quantised_share=0.0, source=f"synthetic {shape.model_type}", source_sha256="synthetic",
        resident_format=shape.resident, resident_packing=packing if coded else "plain",
    ))  # fmt: skip
    return directory


def write_checkpoint(shape: Shape, directory: Path) -> Path:
    """Write a checkpoint of this shape with random weights as transformers itself writes one; its directory. The whole model
    is in memory meanwhile."""
    config = _config(shape)
    model = build_skeleton(config, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    made = {key: _random(tensor, key, generator) for key, tensor in model.state_dict().items()}
    model.load_state_dict(made, assign=True)
    model.tie_weights()
    model.save_pretrained(directory)
    _write_tokenizer(directory, config.vocab_size)
    return directory


def _config(shape: Shape):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[shape.model_type](**shape.arguments, dtype="bfloat16")


def _write_tokenizer(directory: Path, vocabulary: int) -> None:
    """One word a token: enough for an engine that must have a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(directory)


def _random(tensor: torch.Tensor, key: str, generator: torch.Generator) -> torch.Tensor:
    """Weights as a trained model's are scaled: rows of unit gain, norms of one, embeddings as large as what is added to
    them, so that tokens keep apart and are routed apart."""
    if tensor.ndim < 2:
        return (
            torch.ones(tensor.shape, dtype=tensor.dtype)
            if "norm" in key
            else torch.zeros(tensor.shape, dtype=tensor.dtype)
        )
    gain = 1.0 if _EMBEDDING in key else tensor.shape[-1] ** -0.5
    return torch.randn(tensor.shape, generator=generator).mul_(gain).to(tensor.dtype)


def _random_codes(form: MatrixFormat, path: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """int4 weights of the same scale, as codes: made, not fitted, which would take a while for billions of them."""
    (q_type, q_shape), (sz_type, sz_shape) = form.tensors().values()
    scales = torch.zeros(sz_shape, dtype=sz_type)
    gain = 1.0 if _EMBEDDING in path else form.shape[1] ** -0.5
    scales[..., 0] = gain / 4.6  # codes from -8 to 7 have a standard deviation of 4.6
    scales[..., 1] = scales[..., 0] / 2  # their mean is -0.5, and a mean would drown what sets tokens apart
    return {".q": torch.randint(256, q_shape, dtype=q_type, generator=generator), ".sz": scales}


def _write_heads(directory: Path, modules: list[str], gates: list[torch.Tensor], generator: torch.Generator) -> None:
    """Heads of the published inner width for every layer that can own one; they start from their consumers' routers."""
    tensors = {}
    for path, gate in zip(modules, gates[1:]):
        head = TrainedHead.start(gate, _INNER, generator)
        head.fc2.data.normal_(0, _INNER**-0.5, generator=generator)
        tensors[decoder_layer(path)] = head.tensors()
    consumers = ",".join(str(owner + 1) for owner in tensors)
    write_heads(directory / FILE, HeadFile(tensors, {"consumers": consumers}))


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
