"""Tiny checkpoints exactly as mlx-lm and Edge0 publish them, and the transformers model that each stands for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import CONFIGS, save_random, tiny_config, write_tokenizer

GROUP = 64
TOP_K = {"qwen3_5_moe": 2}  # what Edge0's runtime routes to, where its config.json says another number
# Every input width is a multiple of the group.
_WIDE = dict(hidden_size=128, moe_intermediate_size=64, shared_expert_intermediate_size=64, intermediate_size=128,
             linear_key_head_dim=32, linear_value_head_dim=32)  # fmt: skip
_NARROW = dict(olmoe=dict(intermediate_size=64), bailing_hybrid=dict(kv_lora_rank=64, q_lora_rank=64, qk_nope_head_dim=16,
               qk_rope_head_dim=16, v_head_dim=32, head_dim=32), deepseek_v3=dict(kv_lora_rank=64, q_lora_rank=64,
               v_head_dim=32), mixtral=dict(intermediate_size=64))  # fmt: skip


def quantise(weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """W [..., in] -> weight uint32 [..., in * bits / 32], scales and biases bf16 [..., in / 64], by MLX's affine rule."""
    groups, top = weight.float().unflatten(-1, (-1, GROUP)), 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    step = ((high - low) / top).clamp_min(1e-7)
    step = torch.where(low.abs() > high.abs(), step, -step)
    edge = torch.where(low.abs() > high.abs(), low, high)
    at = (edge / step).round()
    scales = torch.where(at != 0, edge / at, step)
    biases = torch.where(at != 0, edge, 0)
    q = ((groups - biases.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, top).to(torch.int64).flatten(-2)
    words = q.unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return {"weight": words.sum(-1).to(torch.uint32), "scales": scales.bfloat16(), "biases": biases.bfloat16()}


def dequantise(parts: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """code * scale + bias, in fp32."""
    q = parts["weight"].to(torch.int64).unsqueeze(-1) >> torch.arange(0, 32, bits) & (2**bits - 1)
    groups = q.flatten(-2).unflatten(-1, (-1, GROUP)).float()
    return (groups * parts["scales"].float().unsqueeze(-1) + parts["biases"].float().unsqueeze(-1)).flatten(-2)


def mlx_config(kind: str, **changes):
    """The configuration of a tiny model of this architecture whose widths MLX can quantise."""
    config = tiny_config(kind)
    for name, value in {**_WIDE, **_NARROW.get(kind, {}), **changes}.items():
        if name in CONFIGS[kind] or name in ("hidden_size", "tie_word_embeddings") or name in _NARROW.get(kind, {}):
            setattr(config, name, value)
    return type(config).from_dict(config.to_dict())


def write_mlx(
    kind: str, directory: Path, dtype: torch.dtype = torch.float32, bits: int = 4, **changes
) -> tuple[Path, torch.nn.Module]:
    """Write a tiny MLX checkpoint of architecture `kind`; it, and transformers' model with the weights it stands for."""
    torch.manual_seed(0)
    config = mlx_config(kind, **changes)
    config.dtype = dtype
    published = config.to_dict()
    if kind in TOP_K:
        config.num_experts_per_tok = TOP_K[kind]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    save_random(model, directory, torch.float32)
    tensors, overrides = _publish(kind, model, bits)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "mlx"})
    if kind == "qwen3_5_moe":
        _write_adapters(directory)
    text = _published_config(kind, published)
    text["quantization"] = text["quantization_config"] = {"group_size": GROUP, "bits": bits, **overrides}
    (directory / "config.json").write_text(json.dumps(text))
    write_tokenizer(directory)
    return directory, model


def _publish(kind: str, model: torch.nn.Module, bits: int) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
    """Published names -> tensors, and the 8-bit overrides; the model gets the values they stand for."""
    tensors, overrides = {}, {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf == "gate_up_proj":
            halves = value.chunk(2, dim=1)
            for half, part in zip(("gate_proj", "up_proj"), halves):
                _put(tensors, f"{path}.{half}", part, bits)
        elif leaf == "down_proj":
            _put(tensors, name, value, bits)
        elif leaf == "weight" and value.ndim == 2 and value.shape[1] % GROUP == 0 and not _plain_router(kind, path):
            own = 8 if path.endswith(("mlp.gate", "shared_expert_gate")) else bits
            _put(tensors, path, value, own)
            if own != bits:
                overrides[published_name(kind, path)] = {"group_size": GROUP, "bits": own}
        elif kind == "qwen3_5_moe" and type(module).__name__ == "Qwen3_5MoeRMSNorm":
            stored = (value + 1).bfloat16()
            value.copy_(stored.float() - 1)
            tensors[name] = stored
        elif kind == "qwen3_5_moe" and leaf == "weight" and value.ndim == 3:
            tensors[name] = value.transpose(1, 2).bfloat16().contiguous()
        else:
            tensors[name] = value.to(torch.bfloat16 if leaf == "weight" else torch.float32).clone()
    if kind == "bailing_hybrid":
        tensors = _split_convolutions(tensors)
    tensors = {published_name(kind, name): tensor for name, tensor in tensors.items()}
    if kind == "qwen3_5_moe":
        tensors["vision_tower.blocks.0.attn.qkv.weight"] = torch.randn(8, 8).bfloat16()
        tensors["language_model.mtp.fc.weight"] = torch.randn(8, 8).bfloat16()
    return tensors, overrides


def _put(tensors: dict, path: str, value: torch.Tensor, bits: int) -> None:
    parts = quantise(value, bits)
    tensors.update({f"{path}.{name}": part for name, part in parts.items()})
    value.copy_(dequantise(parts, bits))


def _plain_router(kind: str, path: str) -> bool:
    return kind in ("bailing_hybrid", "deepseek_v3") and path.endswith("mlp.gate")


def published_name(kind: str, name: str) -> str:
    """transformers' name -> the published one."""
    if kind == "qwen3_5_moe":
        return "language_model." + name.replace(".mlp.experts.", ".mlp.switch_mlp.")
    if kind == "bailing_hybrid":
        name = name.replace("model.embed_tokens.", "model.word_embeddings.").replace(".forget_gate.", ".")
        name = name.replace(".self_attn.", ".attention.").replace("e_score_correction_bias", "expert_bias")
        return name if "layers.2." not in name else name.replace(".attention.o_proj.", ".attention.dense.")
    if kind == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    return name.replace(".experts.", ".switch_mlp.")


def _split_convolutions(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(".conv1d.weight"):
            for part, piece in zip("qkv", tensor.chunk(3)):
                result[name.replace(".conv1d.", f".{part}_conv1d.")] = piece.contiguous()
        else:
            result[name] = tensor
    return result


def _published_config(kind: str, config: dict) -> dict:
    config = json.loads(json.dumps(config, default=str))
    if kind == "qwen3_5_moe":
        vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=64, out_hidden_size=64)
        return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": config,
                "vision_config": vision, "tie_word_embeddings": config["tie_word_embeddings"]}  # fmt: skip
    if kind == "bailing_hybrid":
        config.pop("model_type")
        return {
            **config,
            "architectures": ["BailingMoeV3ForCausalLM"],
            "auto_map": {"AutoConfig": "configuration.Ling"},
        }
    return config


def _write_adapters(directory: Path) -> None:
    heads = {f"layers.1.{part}.weight": torch.randn(4, 4).half() for part in ("fc1", "fc2", "linear_init")}
    nested = json.dumps({"kind": "prerouter", "K": "2", "owners": "[1]", "format_version": "1"})
    save_file(heads, directory / "prerouter_edge0_tiny.safetensors", metadata={"__metadata__": nested})
    pair = {"language_model.model.layers.0.linear_attn.out_proj.lora_A": torch.randn(2, 4).half()}
    save_file(pair, directory / "lora_edge0_tiny.safetensors")
