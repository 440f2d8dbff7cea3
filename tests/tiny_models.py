"""Tiny random checkpoints, written by transformers itself and so in the hub's real key layout."""

from __future__ import annotations

from pathlib import Path

import torch

_COMMON = dict(
    vocab_size=320, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_MLA = dict(q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)

CONFIGS: dict[str, dict] = {
    "mixtral": dict(intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, intermediate_size=96,
                      shared_expert_intermediate_size=64, norm_topk_prob=True),
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, intermediate_size=96, head_dim=16),
    "qwen3_5_moe": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, head_dim=16,
                        shared_expert_intermediate_size=32, **_LINEAR,
                        layer_types=["linear_attention", "linear_attention", "full_attention"]),
    "olmoe": dict(num_experts=8, num_experts_per_tok=3, intermediate_size=32),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=96),
    "deepseek_v2": dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, intermediate_size=96,
                        n_shared_experts=1, first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1,
                        num_key_value_heads=4, **_MLA),
    "deepseek_v3": dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, intermediate_size=96,
                        n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, num_key_value_heads=4,
                        **{**_MLA, "q_lora_rank": 32}),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, head_dim=16, sliding_window=16),
    "granitemoeshared": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32,
                             shared_intermediate_size=32),
    "glm4_moe": dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, intermediate_size=96,
                     n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, head_dim=16),
    "ernie4_5_moe": dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=32, intermediate_size=96,
                         moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=2),
    "bailing_hybrid": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, intermediate_size=96,
                           n_group=2, topk_group=1, head_dim=16, num_key_value_heads=4, first_k_dense_replace=1,
                           layer_types=["linear_attention", "linear_attention", "full_attention"]),
}  # fmt: skip


def tiny_config(kind: str):
    """The transformers configuration of a tiny model of this architecture."""
    from transformers import CONFIG_MAPPING

    name = "qwen3_5_moe_text" if kind == "qwen3_5_moe" else kind
    return CONFIG_MAPPING[name](**{**_COMMON, **CONFIGS[kind]})


def write_checkpoint(kind: str, directory: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a tiny random checkpoint of architecture `kind` and return its directory.

    All parameters are random, routers' and biases' too (transformers starts many at zero, which would hide a mistake),
    and all are bf16 numbers whatever `dtype` they are saved in: a bf16 store of the checkpoint is exact.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return save_random(AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32), directory, dtype)


def save_random(model, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Give `model` random bf16 numbers for weights and save it, with a tokenizer, as a checkpoint in `directory`."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or name.endswith("balancing_biases"):  # zaya's last one is fixed
                continue
            if tensor.ndim > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.8, 1.2)
            else:
                tensor.uniform_(-0.2, 0.2)
            tensor.copy_(tensor.to(torch.bfloat16))
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of 320 tokens with a chat template; ids 0, 1, 2 are pad, begin and end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(
        ["the experts of the model are read from the disk before they are needed"] * 4, trainer
    )
    names = dict(pad_token="<pad>", bos_token="<|im_start|>", eos_token="<|im_end|>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)
