"""Every other architecture with transformers' experts contract prepares and gives transformers' logits, or says why not."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from engine import UnsupportedModelError, prepare
from engine.model.skeleton import cache_argument
from tests.streaming import PROMPT, greedy, open_engine, reference_greedy, streamed
from tests.tiny_models import save_random

# The names different architectures have for the same things; a configuration ignores those it does not know.
SMALL = dict(
    vocab_size=320, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0, intermediate_size=96,
    moe_intermediate_size=32, num_experts=8, num_local_experts=8, n_routed_experts=8, moe_num_experts=8,
    num_experts_per_tok=3, num_experts_per_token=3, moe_topk=3, moe_k=3, top_k_experts=3, n_group=1, topk_group=1,
    num_shared_experts=1, n_shared_experts=1, shared_expert_intermediate_size=32, shared_intermediate_size=32,
    shared_experts_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
    qk_nope_head_dim=16, v_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip
_HYBRID = dict(layer_types=["linear_attention", "linear_attention", "full_attention"])
_SLIDING = dict(sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
_INKLING = dict(swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=16, sliding_window_size=16,
                rel_extent=16, unpadded_vocab_size=300)  # fmt: skip

ARCHITECTURES: dict[str, dict] = {
    "afmoe": {},
    "aria_text": {},
    "axk1": {},
    "axk2": {},
    "beam": dict(mlp_layer_types=["dense", "sparse", "sparse"], **_SLIDING),
    "cohere2_moe": {},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "dots1": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {},
    "gemma4_text": dict(enable_moe_block=True, vocab_size_per_layer_input=320, hidden_size_per_layer_input=16, **_SLIDING),
    "glm4_moe_lite": {},
    "glm_moe_dsa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": dict(layer_types=["mamba", "mamba", "attention"], mamba_n_heads=8, mamba_d_head=16,
                             mamba_d_state=16, mamba_chunk_size=16),
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling2_loop_text": _INKLING,
    "jamba": dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                  expert_layer_offset=1, mamba_dt_rank=8, use_mamba_kernels=False),
    "kimi_linear": dict(linear_head_dim=16, linear_num_heads=4, **_HYBRID),
    "kolibri1": {},
    "laguna": {},
    "lara_mini": {},
    "lfm2_moe": dict(layer_types=["conv", "conv", "full_attention"], num_dense_layers=1),
    "mellum": {},
    "mimo_v2_flash": dict(num_key_value_heads=2, **_SLIDING),
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "nemotron_h": {},
    "qwen3_next": _HYBRID,
    "qwen4_exp_text": dict(layer_types=["linear_attention", "linear_attention", "indexed_attention"], indexer_n_heads=2,
                           indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4,
                           hc_lowrank=16),
    "solar_open": {},
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
}  # fmt: skip

_VISION = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=64, out_hidden_size=64, patch_size=4,
               spatial_merge_size=2, temporal_patch_size=2, deepstack_visual_indexes=[0], num_position_embeddings=16,
               image_size=16)  # fmt: skip
_MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]})
SEEING = {"qwen3_vl_moe": {}, "qwen3_5_moe": _HYBRID, "glm4v_moe": _MROPE}


@torch.no_grad()
def logits(model) -> list[torch.Tensor]:
    """Of a prompt, and of two more tokens on its cache."""
    ids, cache = torch.tensor([PROMPT]), DynamicCache(config=model.config)
    pieces = (ids[:, :-2], ids[:, -2:-1], ids[:, -1:])
    past = {cache_argument(model): cache}
    return [model(input_ids=piece, use_cache=True, **past).logits for piece in pieces]


def assert_same_logits(model, directory, top_k: int):
    with open_engine(prepare(directory, directory.with_name("store"), "bf16"), top_k, "auto") as engine:
        for got, wanted in zip(logits(streamed(engine)), logits(model), strict=True):
            assert torch.isfinite(wanted).all()
            assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        assert engine.stats().dropped == 0


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_it_prepares_and_gives_transformers_logits(kind, tmp_path):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers version has no {kind}")
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SMALL, **ARCHITECTURES[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    directory = save_random(model, tmp_path / "checkpoint", torch.float32)
    assert_same_logits(model, directory, top_k=1 if kind == "zaya" else 3)


@pytest.mark.parametrize("kind", SEEING)
def test_a_model_that_sees_is_used_for_its_text(kind, tmp_path):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](text_config={**SMALL, **SEEING[kind]}, vision_config=_VISION)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    directory = save_random(model, tmp_path / "checkpoint", torch.float32)
    assert_same_logits(model, directory, top_k=3)
    with open_engine(tmp_path / "store", 3) as engine:
        wanted = reference_greedy(model)
        assert greedy(engine) == wanted
        assert greedy(engine, [*PROMPT, *wanted, 50]) == reference_greedy(model, [*PROMPT, *wanted, 50])


def test_a_model_with_a_cache_of_its_own_is_refused(tmp_path):
    config = CONFIG_MAPPING["minimax"](**{**SMALL, **_HYBRID})
    save_random(AutoModelForCausalLM.from_config(config), tmp_path / "checkpoint")
    with pytest.raises(UnsupportedModelError, match="'minimax' does not run with transformers' DynamicCache"):
        prepare(tmp_path / "checkpoint", tmp_path / "store")
    assert not (tmp_path / "store").exists()
