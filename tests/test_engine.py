"""The engine: one generation at a time, statistics that mean something, settings that change, faults that pass."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import (
    BusyError,
    ConfigError,
    Engine,
    EngineConfig,
    GenerationConfig,
    PlanError,
    ReadError,
    StoreError,
    list_models,
    prepare,
)
from engine.store.layout import read_info
from engine.store.verify import verify
from tests.streaming import (
    PROMPT,
    REPETITION,
    greedy,
    open_engine,
    out_of_luck,
    reference,
    reference_greedy,
    stored_experts,
    streamed,
)

GREEDY = GenerationConfig(max_tokens=12, temperature=0, repetition_penalty=REPETITION)
HELLO = [{"role": "user", "content": "hello there"}]


# -- replies ---------------------------------------------------------------------------------------------------------


def test_a_chat_goes_through_the_template(store):
    with open_engine(store("qwen2_moe"), 3) as engine:
        ids = engine.encode_chat(HELLO)
        assert engine.tokenizer.decode(ids) == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
        chunks = list(engine.chat(HELLO, GREEDY))
        assert [token for chunk in chunks for token in chunk.token_ids] == greedy(engine, ids)
        text = "".join(chunk.text for chunk in chunks)
        assert text == engine.tokenizer.decode(greedy(engine, ids), skip_special_tokens=True)
        assert not engine.opens_reasoning(HELLO)


def test_a_conversation_costs_its_new_tokens_only(store):
    with open_engine(store("qwen2_moe"), 3, context=400) as engine:
        messages, held = list(HELLO), 0
        for _ in range(3):
            chunks = list(engine.chat(messages, GREEDY))
            stats = engine.stats()
            assert stats.prompt_tokens == len(engine.encode_chat(messages))
            assert held <= stats.reused_tokens < stats.prompt_tokens
            messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "and then?"}]
            assert len(chunks) == stats.completion_tokens
        prompt = list(range(10, 60))
        tokens = greedy(engine, prompt)
        assert engine.stats().reused_tokens == 0
        greedy(engine, [*prompt, *tokens, 7, 8])
        assert engine.stats().reused_tokens == len(prompt) + len(tokens) - 1  # the last one was never computed
        greedy(engine, [*prompt, *tokens, 7, 8])
        assert engine.stats().reused_tokens == len(prompt) + len(tokens) + 2  # regenerated
        engine.reset()
        greedy(engine, [*prompt, *tokens, 7, 8])
        assert engine.stats().reused_tokens == 0


def test_long_prompts_report_what_they_reused(store):
    with open_engine(store("qwen2_moe"), 3, chunk=8) as engine:
        greedy(engine, list(range(10, 60)))
        assert engine.stats().reused_tokens == 0  # though it was prefilled in pieces


def test_every_end_token_of_the_generation_config_ends_a_reply(own_store, checkpoint):
    """As with models whose config.json names one of several only."""
    wanted = reference_greedy(reference(checkpoint("qwen2_moe")), PROMPT, 40)
    directory = own_store("qwen2_moe")
    for ends in ([wanted[3], wanted[5]], [wanted[5]]):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        with open_engine(directory, 3) as engine:
            assert greedy(engine) == wanted[: 1 + min(map(wanted.index, ends))]
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(StoreError, match="generation_config.json cannot be read"):
        open_engine(directory, 3)


def test_how_a_reply_ends(store, checkpoint):
    wanted = reference_greedy(reference(checkpoint("qwen2_moe")), PROMPT, 40)
    with open_engine(store("qwen2_moe"), 3) as engine:
        chunks = list(engine.complete(PROMPT, replace(GREEDY, max_tokens=5)))
        assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["length"]
        engine._end_ids.add(wanted[3])  # as if this token ended replies
        chunks = list(engine.complete(PROMPT, GREEDY))
        assert [token for chunk in chunks for token in chunk.token_ids] == wanted[:4]
        assert chunks[-1].finish_reason == "stop"
        assert "".join(chunk.text for chunk in chunks) == engine.tokenizer.decode(wanted[:3])  # the end is no text
        engine._end_ids.discard(wanted[3])
        whole = engine.tokenizer.decode(wanted[:12])
        stop = next(character for character in whole[1:] if character.isascii())
        chunks = list(engine.complete(PROMPT, replace(GREEDY, stop=(stop,))))
        assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].finish_reason == "stop"


def test_the_context_is_a_limit(store):
    with open_engine(store("qwen2_moe"), 3, context=20) as engine:
        with pytest.raises(
            ConfigError, match="the prompt has 20 tokens and the context is 20: shorten the conversation or"
        ):
            greedy(engine, list(range(10, 30)))
        with pytest.raises(ConfigError, match="the prompt is empty"):
            greedy(engine, [])
        assert len(greedy(engine, list(range(10, 28)), tokens=50)) == 2  # and the reply ends with the context
        assert engine.stats().completion_tokens == 2


def test_sampling_reproduces_with_a_seed(store):
    def say(engine, seed):
        generation = GenerationConfig(max_tokens=12, temperature=1.0, seed=seed)
        return [token for chunk in engine.complete(PROMPT, generation) for token in chunk.token_ids]

    with open_engine(store("qwen2_moe"), 3) as engine:
        first = say(engine, 1)
        assert say(engine, 1) == first
        assert say(engine, 2) != first
    with open_engine(store("qwen2_moe"), None) as engine:
        assert say(engine, 1) == first


# -- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_mean_something(store):
    with open_engine(store("qwen2_moe"), 5, "gate") as engine:
        assert engine.stats().completion_tokens == 0
        greedy(engine)
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.completion_tokens) == (len(PROMPT), 12)
        assert (stats.mode, stats.prefetch, stats.device) == ("on-demand", "gate", "cpu")
        assert stats.ttft_s > 0
        assert stats.tok_s > 0
        assert stats.prefill_tok_s > 0
        assert 0 <= stats.hit_rate <= 1
        assert 0 < stats.bytes_read
        assert stats.bytes_read % engine.info.layout.record_bytes == 0
        assert stats.read_s > 0
        assert stats.stall_s >= 0
        assert 0 <= stats.hidden_io <= 1
        assert stats.rss_bytes > stats.peak_active_bytes > 0
        assert sum(stats.active_bytes_by_kind.values()) <= stats.peak_active_bytes
        engine.restart_peak()
        assert engine.stats().peak_active_bytes == sum(stats.active_bytes_by_kind.values())


def test_statistics_and_the_map_can_be_read_while_generating(store):
    with open_engine(store("qwen2_moe"), 5, "gate") as engine:
        seen, stop = [], threading.Event()

        def look():
            while not stop.is_set():
                seen.append(engine.stats().completion_tokens)
                assert engine.residency().shape == (3, 8)

        watcher = threading.Thread(target=look)
        watcher.start()
        greedy(engine, tokens=60)
        stop.set()
        watcher.join(60)
        assert seen == sorted(seen)
        residency = engine.residency()
        assert residency.max() <= 4
        assert (residency > 0).sum() >= 5


# -- one at a time, and changing settings ----------------------------------------------------------------------------


def test_one_generation_at_a_time(store):
    with open_engine(store("qwen2_moe"), 3) as engine:
        replies = engine.complete(PROMPT, GREEDY)
        next(replies)
        for call in (lambda: greedy(engine), engine.reset, lambda: engine.configure(expert_memory="50%")):
            with pytest.raises(BusyError, match="the engine is generating"):
                call()
        replies.close()
        greedy(engine)
        engine.configure(expert_memory="50%")
        assert engine.plan.slots == 12


def test_changing_settings(store):
    with open_engine(store("qwen2_moe"), 3) as engine:
        record = engine.info.layout.record_bytes
        engine.configure(expert_memory=7 * record, prefetch="gate")
        assert (engine.plan.slots, engine.config.prefetch) == (7, "gate")
        assert engine.stats().expert_budget_bytes == 7 * record
        engine.configure(prefetch="none")
        assert (engine.plan.slots, engine.config.prefetch) == (7, "none")
        before = greedy(engine)
        for settings, error in (
            (dict(expert_memory=record), PlanError),
            (dict(expert_memory="lots"), ConfigError),
            (dict(prefetch="psychic"), ConfigError),
        ):
            with pytest.raises(error):
                engine.configure(**settings)
            assert (engine.plan.slots, engine.config.prefetch) == (7, "none")
            assert greedy(engine) == before


def test_off_means_the_router_is_as_it_was(store):
    with open_engine(store("qwen2_moe"), None) as engine:
        kinds = [type(module).__name__ for module in streamed(engine).modules()]
        assert "RouterSeam" not in kinds  # nothing can be missing: nobody watches
        engine.configure(expert_memory="50%")
        assert "RouterSeam" in [type(module).__name__ for module in streamed(engine).modules()]
        engine.configure(expert_memory="100%")
        assert [type(module).__name__ for module in streamed(engine).modules()] == kinds


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_int4_resident_weights(kind, store):
    with open_engine(store(kind), 5) as native, open_engine(store(kind), 5, resident="int4") as packed:
        assert len(greedy(packed)) > 0
        assert packed.stats().active_bytes_by_kind["resident"] <= native.stats().active_bytes_by_kind["resident"]


# -- what cannot be loaded -------------------------------------------------------------------------------------------


def test_a_budget_below_the_minimum(store):
    with pytest.raises(
        PlanError, match="is below the minimum for .*: one layer's 3 experts need .* set it to at least"
    ):
        open_engine(store("qwen2_moe"), 2)


def test_names_that_lead_nowhere(checkpoint, tmp_path):
    with pytest.raises(
        StoreError, match=r"no model 'nowhere': it is neither .* prepare one with `python -m engine prepare"
    ):
        Engine(EngineConfig("nowhere"))
    with pytest.raises(StoreError, match=r"is a checkpoint, not a prepared store: run `python -m engine prepare"):
        Engine(EngineConfig(str(checkpoint("qwen2_moe"))))


def test_stores_are_found_by_name_and_damaged_ones_left_out(own_store, tmp_path, monkeypatch):
    models = tmp_path / "models"
    models.mkdir()
    own_store("qwen2_moe").rename(models / "mine")
    own_store("olmoe").rename(models / "broken")
    own_store("gpt_oss").rename(models / "half.partial")
    (models / "broken/experts.bin").unlink()
    monkeypatch.setattr("engine.registry.MODELS_DIR", models)
    assert [info.name for info in list_models()] == ["mine"]
    with Engine(EngineConfig("mine", "50%", context=64)) as engine:
        assert len(greedy(engine)) == 12
    with pytest.raises(StoreError, match=r"experts\.bin is missing; prepare the model again"):
        Engine(EngineConfig("broken"))
    with pytest.raises(StoreError, match="the default model is not prepared yet: run `python -m engine fetch-default`"):
        Engine(EngineConfig("default"))


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_store_without_a_tokenizer(own_store, content):
    directory = own_store()
    (directory / "tokenizer.json").unlink() if content is None else (directory / "tokenizer.json").write_text(content)
    with pytest.raises(StoreError, match="has no tokenizer that can be loaded") as caught:
        open_engine(directory, 3)
    assert "\n" not in str(caught.value)


def test_store_and_configuration_of_different_models(own_store, checkpoint):
    directory = own_store()
    shutil.copyfile(checkpoint("deepseek_v3") / "config.json", directory / "config.json")
    with pytest.raises(StoreError, match=r"store\.json and config\.json disagree about the MoE layers; prepare"):
        open_engine(directory, 3)


def test_a_store_of_another_models_weights(own_store):
    """Same module names, other shapes: as if two stores had been mixed up."""
    directory = own_store("qwen2_moe")
    shutil.copyfile(own_store("qwen3_moe") / "resident.safetensors", directory / "resident.safetensors")
    with pytest.raises(StoreError, match=r"resident\.safetensors") as caught:
        open_engine(directory, 3)
    assert "prepare the model again" in str(caught.value)
    assert "\n" not in str(caught.value)


# -- faults while generating -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", ["none", "gate"])
@pytest.mark.parametrize("after", [0, 4])
def test_a_store_that_is_truncated_while_in_use(own_store, prefetch, after):
    directory = own_store()
    experts = directory / "experts.bin"
    content = experts.read_bytes()
    with open_engine(directory, 3, prefetch) as engine:
        wanted = greedy(engine)
        replies, got = engine.complete(PROMPT, GREEDY), []
        with pytest.raises(ReadError, match=rf"{experts} ends at byte \d+, inside record \d+.*prepare the model again"):
            for chunk in replies:
                got += chunk.token_ids
                if len(got) > after:
                    os.truncate(experts, 4096)
        assert got == wanted[: len(got)]
        experts.write_bytes(content)
        assert greedy(engine) == wanted
        assert greedy(engine, [*PROMPT, *wanted, 5]) == greedy_in_a_new_engine(directory, [*PROMPT, *wanted, 5])
        assert engine.stats().dropped == 0


def greedy_in_a_new_engine(directory: Path, prompt: list[int]) -> list[int]:
    with open_engine(directory, None) as engine:
        return greedy(engine, prompt)


def test_a_read_that_fails_while_in_use(own_store):
    with open_engine(own_store(), 3) as engine:
        wanted = greedy(engine)
        reader = engine._tier.fetcher._reader
        good, reader._descriptor = reader._descriptor, os.open("/", os.O_RDONLY)
        with pytest.raises(ReadError, match=r"cannot read .*experts\.bin at byte \d+: .*; check the disk, then load"):
            greedy(engine)
        os.close(reader._descriptor)
        reader._descriptor = good
        assert greedy(engine) == wanted


def test_an_error_inside_the_model_leaves_the_engine_usable(store):
    with open_engine(store("qwen2_moe"), 3) as engine:
        wanted = greedy(engine)
        with out_of_luck(engine), pytest.raises(RuntimeError, match="out of luck"):
            greedy(engine)
        assert greedy(engine) == wanted
        assert engine.stats().dropped == 0


def test_a_template_that_refuses(own_store):
    directory = own_store()
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no system prompts here') }}")
    with open_engine(directory, 3) as engine:
        with pytest.raises(
            ConfigError, match="the model's chat template refuses this conversation: no system prompts here"
        ):
            list(engine.chat(HELLO, GREEDY))
        greedy(engine)


def test_a_base_model_without_a_template(own_store):
    directory = own_store()
    (directory / "chat_template.jinja").unlink()
    with open_engine(directory, 3) as engine:
        assert engine.tokenizer.decode(engine.encode_chat(HELLO)).endswith("hello there")


# -- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["plain", "avx2", "avx512"])
def test_a_store_packed_on_another_machine_gives_the_same_tokens(written, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.kernels.int4.native_packing", lambda: written)
    directory = prepare(checkpoint("qwen2_moe"), tmp_path / "store", "int4")
    assert read_info(directory).packing == written
    monkeypatch.undo()
    before = [tensors for _, _, tensors in stored_experts(directory)]
    with open_engine(directory, 3) as engine:
        greedy(engine)
    verify(directory, lambda progress: None)
    after = [tensors for _, _, tensors in stored_experts(directory)]
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert len(list(directory.glob("experts*.bin"))) == 1


def test_closing_ends_the_readers(store):
    engine = open_engine(store("qwen2_moe"), 3)
    greedy(engine)
    assert any(thread.name.startswith("store-read") for thread in threading.enumerate())
    engine.close()
    assert not any(thread.name.startswith("store-read") for thread in threading.enumerate())
    engine.close()
    with pytest.raises(ConfigError, match="the engine is closed"):
        greedy(engine)


def test_the_page_cache_is_a_choice(store):
    with open_engine(store("qwen2_moe"), 3) as around, open_engine(store("qwen2_moe"), 3, page_cache=True) as through:
        assert greedy(around) == greedy(through)
        assert not through._tier.fetcher._reader.direct
