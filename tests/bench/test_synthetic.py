"""A synthetic checkpoint is one as transformers writes it, of the shape that was asked for."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.bench.cli import add_arguments, run
from engine.bench.synthetic import SHAPES, write_checkpoint
from engine.errors import ConfigError
from engine.store.layout import read_info
from engine.store.writer import prepare


def test_a_synthetic_checkpoint_is_loaded_and_prepared_like_any_other(tmp_path):
    shape = SHAPES["olmoe-7b"].first_layers(2)
    small = replace(shape, arguments={**shape.arguments, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 128,
                                      "num_attention_heads": 4, "num_key_value_heads": 4})  # fmt: skip
    checkpoint = write_checkpoint(small, tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all() and logits.std() > 0
    info = read_info(prepare(checkpoint, tmp_path / "store", "bf16"))
    assert (len(info.layers), info.experts, info.top_k, info.hidden) == (2, 64, 8, 64)


@pytest.mark.parametrize(("arguments", "said"), [
    (["peers", "--model", "olmoe-7b", "--layers", "17"], "olmoe-7b has 1 to 16"),
    (["stream", "--layers", "2"], "--layers makes a synthetic model smaller"),
    (["specter-greedy", "--model", "olmoe-7b"], "random weights write none"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_is_written(arguments, said, tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match=said):
        run(parser.parse_args([*arguments, "--work", str(tmp_path)]))
    assert not list(tmp_path.iterdir())
