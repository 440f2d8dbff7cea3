"""Specter mode says what plain decoding says, whatever the draft, the depth and the memory, and leaves no trace."""

from __future__ import annotations

import json
import os
import random
import threading
from functools import cache

import pytest
import torch

from engine import ConfigError, EngineConfig, GenerationConfig, Mode, PlanError, ReadError
from engine.cli import main
from engine.engine import plan
from engine.store.draft import draft_bytes
from engine.store.layout import read_info
from tests.edge0 import put_heads
from tests.specter import divergence, drafted_copy, spoil_draft
from tests.streaming import PROMPT, REPETITION, greedy, open_engine, out_of_luck, streamed

# Full attention with and without shared experts, latent attention, sliding windows, biases, recurrent layers of two kinds.
KINDS = ["mixtral", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_5_moe", "bailing_hybrid"]
GOOD, FAIR, BAD = 4, 3, 2  # bits of the drafts; the last one is of other experts altogether
DEPTHS = [(GOOD, 1), (GOOD, 3), (GOOD, 8), (GOOD, "auto"), (FAIR, 3), (BAD, 3), (BAD, "auto")]
LONG = [*PROMPT, *range(60, 72)]  # over the sliding windows
TOKENS = 10  # shorter than what makes an engine reconsider whether to keep its draft in memory
GREEDY = GenerationConfig(max_tokens=16, temperature=0, repetition_penalty=REPETITION)


def prompts(kind: str, count: int = 7) -> list[list[int]]:
    choice = random.Random(kind)
    return [choice.choices(range(3, 320), k=choice.randint(3, 24)) for _ in range(count)]  # windows are 16 long


@pytest.fixture(scope="module")
def drafted(store, tmp_path_factory):
    """drafted(kind, experts) -> a store with a good, a fair and a bad draft, not to be changed."""

    @cache
    def make(kind: str = "qwen2_moe", experts: str = "bf16"):
        directory = drafted_copy(store(kind, experts), tmp_path_factory.mktemp("drafted") / kind, GOOD, FAIR, BAD)
        spoil_draft(directory, BAD)
        return directory

    return make


@pytest.fixture(scope="module")
def plain(store):
    """plain(kind) -> an engine on demand with all experts resident."""
    opened = {}

    def make(kind: str = "qwen2_moe", experts: str = "bf16"):
        key = kind, experts
        if key not in opened:
            opened[key] = open_engine(store(kind, experts), None)
        opened[key].reset()
        return opened[key]

    yield make
    for engine in opened.values():
        engine.close()


@pytest.fixture
def specter():
    """specter(directory, slots, depth, bits, ...) -> an engine in Specter mode with so many slots beside its draft."""
    opened = []

    def make(directory, slots: int | None = None, depth: str | int = 3, bits: int = GOOD, **settings):
        engine = open_engine(directory, None, mode=Mode.ON_DEMAND, **settings)
        opened.append(engine)
        engine.configure(mode=Mode.SPECTER, depth=depth, draft_bits=bits, expert_memory=memory(directory, slots, bits))
        return engine

    yield make
    for engine in opened:
        engine.close()


def memory(directory, slots: int | None, bits: int = GOOD) -> int:
    """Bytes of so many slots and a draft; None: the least that is possible and two slots more."""
    info = read_info(directory)
    return draft_bytes(info, bits) + (info.top_k + 2 if slots is None else slots) * info.layout.record_bytes


def reply(engine, prompt: list[int], config: GenerationConfig = GREEDY, stop=None) -> tuple[list[int], str, str]:
    """(tokens, text, why it ended) of a reply."""
    chunks = list(engine.complete(prompt, config, stop))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


# -- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(kind, drafted, plain, specter):
    """Of seven prompts an architecture, each in two of the seven settings."""
    directory, engine, asked = drafted(kind), plain(kind), prompts(kind)
    wanted = [greedy(engine, prompt, TOKENS) for prompt in asked]
    speculating, proposed, partings = specter(directory), 0, []
    for i, (bits, depth) in enumerate(DEPTHS):
        speculating.configure(depth=depth, draft_bits=bits, expert_memory=memory(directory, None, bits))
        for n in (i, (i + 1) % len(asked)):
            parting = divergence(engine, asked[n], greedy(speculating, asked[n], TOKENS), wanted[n])
            if parting:
                partings.append(f"prompt {n}, {bits} bits, depth {depth}: {parting}")
            stats = speculating.stats()
            assert stats.dropped == 0 and not stats.draft_parked
            proposed += len(stats.acceptance_by_position) > 0
    assert not partings, "\n".join(partings)
    assert proposed > len(DEPTHS)  # speculation took place


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_5_moe"])
def test_tokens_do_not_depend_on_the_memory(kind, drafted, plain, specter):
    directory, info, partings = drafted(kind), read_info(drafted(kind)), []
    asked = [LONG[:9], LONG]
    wanted = [greedy(plain(kind), prompt, TOKENS) for prompt in asked]
    engine = specter(directory)
    for slots in (info.top_k, len(info.layers) * info.experts // 2, len(info.layers) * info.experts):
        for prefetch in ("none", "gate"):
            engine.configure(expert_memory=memory(directory, slots), prefetch=prefetch)
            engine.reset()
            assert engine.plan.slots == slots
            partings += [divergence(plain(kind), prompt, greedy(engine, prompt, TOKENS), tokens)
                         for prompt, tokens in zip(asked, wanted)]  # fmt: skip
            assert engine.stats().dropped == 0
    assert partings == [None] * len(partings)


def test_tokens_are_the_same_over_an_emulated_link(drafted, plain, specter):
    engine = specter(drafted(), device="cpu", emulated_link="50MB")
    assert greedy(engine) == greedy(plain())
    assert (engine.stats().link, engine.stats().dropped) == ("emulated", 0)


def test_a_bf16_model_says_the_same_but_for_near_ties(checkpoint, store, tmp_path, specter):
    """Rows of a batch are rounded as rows of one where the kernels do not depend on their number."""
    directory = drafted_copy(store("qwen2_moe", "bf16", torch.bfloat16), tmp_path / "store", GOOD)
    engine, asked = specter(directory), prompts("bf16", 4)
    speculated = [greedy(engine, prompt, TOKENS) for prompt in asked]
    engine.configure(mode=Mode.ON_DEMAND)
    engine.reset()
    decoded = [greedy(engine, prompt, TOKENS) for prompt in asked]
    partings = [divergence(engine, prompt, got, wanted) for prompt, got, wanted in zip(asked, speculated, decoded)]
    assert partings == [None] * len(asked)


def test_a_seed_reproduces_a_sampled_reply(drafted, specter):
    engine, config = specter(drafted()), GenerationConfig(max_tokens=12, temperature=1, top_p=0.9, seed=3)
    first = reply(engine, PROMPT, config)
    engine.reset()
    assert reply(engine, PROMPT, config) == first
    assert reply(engine, PROMPT, GenerationConfig(max_tokens=12, temperature=1, top_p=0.9, seed=4)) != first


# -- the end of a reply ----------------------------------------------------------------------------------------------

STIFF = {"qwen2_moe": False, "gpt_oss": True, "qwen3_5_moe": True}  # whether the cache cannot be cropped everywhere


def assert_next_turn(engine, plain_engine, said: list[int], stiff: bool) -> None:
    """The conversation holds what was `said`, and goes on as a new one would."""
    turn = [*said, 5, 6, 7]
    parting = divergence(plain_engine, turn, greedy(engine, turn, 6), greedy(plain_engine, turn, 6))
    assert parting is None, parting
    reused = engine.stats().reused_tokens
    assert reused < len(said) if stiff else reused == len(said) - 1


@pytest.mark.parametrize("kind", STIFF)
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_max_tokens_is_exact(kind, length, drafted, plain, specter):
    wanted = greedy(plain(kind), LONG, 8)
    engine = specter(drafted(kind), depth=4)
    tokens, _, reason = reply(engine, LONG, GenerationConfig(max_tokens=length, temperature=0, repetition_penalty=1.5))
    assert (tokens, reason) == (wanted[:length], "length")
    assert_next_turn(engine, plain(kind), [*LONG, *tokens], STIFF[kind])


def overran(stats) -> bool:
    """Whether tokens were accepted that were not said any more."""
    return sum((a + 1) * windows for a, windows in enumerate(stats.accepted_per_window)) > stats.completion_tokens - 1


@pytest.mark.parametrize("kind", STIFF)
def test_an_end_token_inside_an_accepted_prefix_ends_the_reply(kind, drafted, plain, specter, tmp_path):
    wanted, overruns = greedy(plain(kind), LONG, 10), 0
    for at in (2, 3, 5):
        if wanted[at] in wanted[:at]:
            continue
        directory = drafted_copy(drafted(kind), tmp_path / str(at))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": wanted[at]}))
        engine = specter(directory, depth=8)
        tokens, _, reason = reply(engine, LONG)
        assert (tokens, reason) == (wanted[: at + 1], "stop")
        overruns += overran(engine.stats())
        assert_next_turn(engine, plain(kind), [*LONG, *tokens], STIFF[kind])
    assert overruns


@pytest.mark.parametrize("kind", STIFF)
def test_a_stop_string_inside_an_accepted_prefix_ends_the_reply(kind, drafted, plain, specter):
    engine, reference = specter(drafted(kind), depth=8), plain(kind)
    overruns = 0
    _, whole, _ = reply(reference, LONG)
    for at in range(2, len(whole) - 2, 3):
        config = GenerationConfig(max_tokens=16, temperature=0, repetition_penalty=REPETITION, stop=(whole[at : at + 2],))
        wanted = reply(reference, LONG, config)
        assert reply(engine, LONG, config) == wanted
        overruns += overran(engine.stats())
    assert overruns
    assert_next_turn(engine, reference, [*LONG, *wanted[0]], STIFF[kind])


@pytest.mark.parametrize("kind", STIFF)
def test_stop_is_heard_within_a_draft_token(kind, drafted, plain, specter):
    engine, wanted = specter(drafted(kind), depth=8), greedy(plain(kind), LONG, 16)
    for at in (2, 4, 9):  # forwards: the first is the prompt's
        stop, forwards = threading.Event(), []

        def count(*_, at=at, stop=stop, forwards=forwards) -> None:
            forwards.append(stop.is_set())
            if len(forwards) == at:
                stop.set()

        hook = streamed(engine).register_forward_hook(count)
        engine.reset()
        tokens, _, reason = reply(engine, LONG, stop=stop)
        hook.remove()
        assert reason == "stopped"
        assert tokens == wanted[: len(tokens)] and len(tokens) < len(wanted)
        assert sum(forwards) <= (2 if STIFF[kind] else 1)  # if it was the last draft token, its window is verified
        assert_next_turn(engine, plain(kind), [*LONG, *tokens], STIFF[kind])
        assert greedy(engine, LONG, 16) == wanted


@pytest.mark.parametrize("kind", STIFF)
@pytest.mark.parametrize("said", [1, 2, 4])
def test_a_reply_that_is_closed_early_leaves_what_was_said(kind, said, drafted, plain, specter):
    engine, wanted = specter(drafted(kind), depth=8), greedy(plain(kind), LONG, 16)
    chunks = engine.complete(LONG, GREEDY)
    tokens = [next(chunks).token_ids[0] for _ in range(said)]
    chunks.close()
    assert tokens == wanted[:said]
    assert_next_turn(engine, plain(kind), [*LONG, *tokens], STIFF[kind])
    assert greedy(engine, LONG, 16) == wanted


@pytest.mark.parametrize("kind", STIFF)
def test_the_next_turn_and_the_same_prompt_again_reuse_the_cache(kind, drafted, plain, specter):
    engine, reference = specter(drafted(kind), depth=3), plain(kind)
    wanted = greedy(reference, LONG, 9)
    assert greedy(engine, LONG, 9) == wanted
    assert greedy(engine, LONG, 9) == wanted
    assert engine.stats().reused_tokens == len(LONG)
    assert_next_turn(engine, reference, [*LONG, *wanted], STIFF[kind])


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 8])
def test_an_expert_that_cannot_be_read_while_verifying_leaves_the_engine_usable(depth, drafted, specter, tmp_path):
    directory = drafted_copy(drafted(), tmp_path / "own")
    experts = directory / "experts.bin"
    content = experts.read_bytes()
    engine = specter(directory, depth=depth)
    wanted = greedy(engine)
    got = []
    with pytest.raises(ReadError, match=rf"{experts} ends at byte \d+"):
        for chunk in engine.complete(PROMPT, GREEDY):
            got += chunk.token_ids
            os.truncate(experts, 4096)
    assert got and got == wanted[: len(got)]
    assert all(getattr(module, "draft", None) is None for module in streamed(engine).modules())
    experts.write_bytes(content)
    assert greedy(engine) == wanted
    assert greedy(engine, [*PROMPT, *wanted, 5]) == greedy_anew(directory, [*PROMPT, *wanted, 5])


def greedy_anew(directory, prompt: list[int]) -> list[int]:
    with open_engine(directory, None) as engine:
        return greedy(engine, prompt)


def test_an_error_while_drafting_leaves_the_engine_usable(drafted, specter):
    engine = specter(drafted())
    wanted = greedy(engine)
    with out_of_luck(engine), pytest.raises(RuntimeError, match="out of luck"):
        greedy(engine)
    assert greedy(engine) == wanted


# -- entering and leaving --------------------------------------------------------------------------------------------


def named(engine) -> dict[str, int]:
    """Every tensor of the model by name, and where it lies."""
    model = streamed(engine)
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_the_draft_shares_every_tensor_but_the_experts(drafted, specter):
    engine = specter(drafted())
    before, modules = named(engine), [name for name, _ in streamed(engine).named_modules()]
    engine.forecast.begin()
    try:
        assert named(engine) == before
        assert [name for name, _ in streamed(engine).named_modules()] == modules
        assert all(streamed(engine).get_submodule(path).draft is not None for path in engine.info.layers)
    finally:
        engine.forecast.end()
    assert named(engine) == before
    assert all(streamed(engine).get_submodule(path).draft is None for path in engine.info.layers)


def test_modes_change_without_a_reload_and_leave_no_trace(drafted, tmp_path):
    directory = drafted_copy(drafted(), tmp_path / "own")
    put_heads(directory)
    with open_engine(directory, 8) as engine:
        assert engine.modes() == {"on-demand": None, "edge0": None, "specter": None}
        exact, wanted = engine.force(PROMPT, PROMPT[::-1]), greedy(engine)
        tensors, modules = named(engine), [name for name, _ in streamed(engine).named_modules()]
        for _ in range(2):
            engine.configure(mode=Mode.SPECTER, depth=3, expert_memory=memory(directory, 8))
            assert greedy(engine) == wanted
            stats = engine.stats()
            assert stats.active_bytes_by_kind["draft"] > 0
            assert (stats.mode, stats.draft_bits) == ("specter", 4) and stats.draft_depth in (0, 1, 2, 3)
            assert sum(stats.accepted_per_window) > 0 and stats.acceptance_by_position
            assert 0 < stats.forecast_recall <= 1 and stats.draft_s > 0 and stats.verify_s > 0
            engine.configure(mode=Mode.EDGE0, expert_memory="50%")
            assert not torch.equal(engine.force(PROMPT, PROMPT[::-1]), exact)
            assert engine.stats().active_bytes_by_kind["draft"] == 0
            engine.configure(mode=Mode.ON_DEMAND)
            engine.reset()
            assert torch.equal(engine.force(PROMPT, PROMPT[::-1]), exact)
            assert greedy(engine) == wanted
            assert named(engine) == tensors
            assert [name for name, _ in streamed(engine).named_modules()] == modules
            stats = engine.stats()
            assert stats.active_bytes_by_kind["draft"] == 0
            assert (stats.draft_bits, stats.draft_depth, stats.draft_parked, stats.forecast_recall) == (None, None, False, None)
            assert (stats.accepted_per_window, stats.acceptance_by_position) == ((), ())
            assert (stats.draft_s, stats.verify_s) == (0, 0)


def test_a_conversation_goes_on_in_specter_mode(drafted, plain):
    """Its keys and values are those of on-demand mode."""
    wanted = greedy(plain(), PROMPT)
    turn = [*PROMPT, *wanted, 9, 10]
    expected = greedy(plain(), turn)
    with open_engine(drafted(), 8) as engine:
        assert greedy(engine) == wanted
        engine.configure(mode=Mode.SPECTER, depth=3, expert_memory=memory(drafted(), 8))
        assert divergence(plain(), turn, greedy(engine, turn), expected) is None
        assert engine.stats().reused_tokens == len(PROMPT) + len(wanted) - 1


def test_depth_0_is_plain_decoding(drafted, plain, specter):
    engine = specter(drafted(), depth=0)
    assert greedy(engine) == greedy(plain())
    stats = engine.stats()
    assert stats.draft_depth == 0
    assert stats.acceptance_by_position == () and stats.accepted_per_window == (len(greedy(plain())) - 1,)


def test_a_draft_that_is_parked_gives_its_memory_to_the_slots(drafted, plain, specter):
    """With free depth an engine tries both ways; the tokens are always the same, and the memory never more."""
    directory, wanted, seen = drafted(), greedy(plain(), PROMPT, 32), set()
    engine = specter(directory, slots=6, depth="auto")
    budget = engine.plan.expert_budget_bytes
    for _ in range(8):  # how many it takes is a matter of time
        engine.reset()
        parting = divergence(plain(), PROMPT, greedy(engine, PROMPT, 32), wanted)
        assert parting is None, parting
        stats = engine.stats()
        held = stats.active_bytes_by_kind
        assert (held["draft"] == 0) == stats.draft_parked
        assert held["draft"] + held["experts"] <= budget == stats.expert_budget_bytes
        seen.add(stats.draft_parked)
        if len(seen) == 2:
            break
    assert seen == {False, True}
    engine.configure(mode=Mode.ON_DEMAND)
    assert engine.stats().active_bytes_by_kind["draft"] == 0
    assert greedy(engine, PROMPT, 32) == wanted


def test_a_change_that_does_not_fit_any_more_is_put_off(drafted, specter, monkeypatch):
    """Somebody else took the memory between two replies: the engine goes on as it is."""
    engine = specter(drafted(), slots=6, depth="auto")
    wanted = greedy(engine, PROMPT, 32)
    monkeypatch.setattr("engine.engine.available_memory", lambda device: 0)
    for _ in range(4):
        assert greedy(engine, PROMPT, 32) == wanted
    assert not engine.stats().draft_parked


def test_the_ledger_counts_the_draft_in_memory(drafted, specter):
    directory = drafted()
    sizes = {bits: draft_bytes(read_info(directory), bits) for bits in (4, 3, 2)}
    assert sizes[4] > sizes[3] > sizes[2]
    engine = specter(directory)
    for bits, size in sizes.items():
        engine.configure(draft_bits=bits)
        assert 0.9 * size < engine.stats().active_bytes_by_kind["draft"] <= size
        assert engine.stats().draft_bits == bits


# -- what is planned and refused -------------------------------------------------------------------------------------


def test_the_plan_counts_the_draft_within_the_memory_of_experts(drafted):
    info, draft = read_info(drafted()), draft_bytes(read_info(drafted()), 3)
    common = dict(model=str(drafted()), mode=Mode.SPECTER, draft_bits=3, context=256)
    result = plan(EngineConfig(**common, expert_memory=draft + 7 * info.layout.record_bytes + 100))
    assert (result.draft_bytes, result.slots) == (draft, 7)
    assert result.min_expert_bytes == draft + info.top_k * info.layout.record_bytes
    assert result.max_expert_bytes == draft + info.expert_bytes_total
    everything = plan(EngineConfig(**common))
    assert everything.slots == len(info.layers) * info.experts
    without = plan(EngineConfig(model=str(drafted()), context=256))
    assert everything.total_bytes == without.total_bytes + draft
    assert (without.draft_bytes, without.min_expert_bytes) == (0, info.top_k * info.layout.record_bytes)


def test_a_memory_that_cannot_hold_the_draft_and_one_layer_is_refused(drafted):
    least = memory(drafted(), read_info(drafted()).top_k)
    with open_engine(drafted(), 8) as engine:
        wanted = greedy(engine)
        message = rf"3 experts and the draft need [\d.]+ KiB \({least} bytes\); set it to at least that"
        with pytest.raises(PlanError, match=message):
            engine.configure(mode=Mode.SPECTER, expert_memory=least - 1)
        assert engine.config.mode is Mode.ON_DEMAND and engine.plan.slots == 8
        assert greedy(engine) == wanted
        engine.configure(mode=Mode.SPECTER, expert_memory=least, depth=3)
        assert greedy(engine) == wanted


def test_a_model_without_a_draft_says_how_to_get_one(own_store):
    directory = own_store()
    with pytest.raises(ConfigError, match="has no 4-bit draft: make one with `python -m engine draft"):
        open_engine(directory, mode=Mode.SPECTER)
    with open_engine(directory) as engine:
        wanted = greedy(engine)
        assert "python -m engine draft" in engine.modes()["specter"]
        with pytest.raises(ConfigError, match="--bits 4"):
            engine.configure(mode=Mode.SPECTER)
        assert greedy(engine) == wanted


@pytest.mark.parametrize("settings", [dict(depth=33), dict(depth=-1), dict(depth="deep"), dict(draft_bits=5)])
def test_settings_that_are_not_possible_are_refused(settings, drafted):
    with pytest.raises(ConfigError, match="is not possible: choose"):
        EngineConfig(str(drafted()), **settings)
    with open_engine(drafted(), 8) as engine, pytest.raises(ConfigError, match="is not possible: choose"):
        engine.configure(**settings)


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(capsys):
    """cli(arguments) -> the JSON object that a command prints last."""

    def call(*arguments: object) -> dict:
        code = main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out.splitlines()[-1])

    return call


def test_draft_then_chat(own_store, cli):
    directory = own_store()
    made = cli("draft", directory, "--bits", 4)
    info = read_info(directory)
    assert made == {"draft": str(directory / "draft-4.bin"), "bits": 4, "bytes": draft_bytes(info, 4)}
    common = ("--expert-memory", memory(directory, 6), "--context", 128, "--mode", "specter", "--draft-bits", 4)
    said = cli("chat", directory, *common, "--depth", 2, "--prompt", "hi", "--max-tokens", 7, "--greedy")
    assert said["stats"]["mode"] == "specter" and said["stats"]["draft_depth"] is not None
    assert len(said["token_ids"]) == 7 and sum(said["stats"]["accepted_per_window"]) > 0
    alone = cli("chat", directory, "--context", 128, "--prompt", "hi", "--max-tokens", 7, "--greedy")
    assert said["token_ids"] == alone["token_ids"]
    planned = cli("plan", directory, *common)
    assert (planned["draft_bytes"], planned["slots"]) == (draft_bytes(info, 4), 6)


def test_preparing_makes_the_draft_too(checkpoint, tmp_path, cli):
    source = checkpoint("qwen2_moe")
    cli("prepare", source, tmp_path / "usual", "--experts", "bf16")
    assert (tmp_path / "usual" / "draft-4.json").is_file()
    cli("prepare", source, tmp_path / "chosen", "--experts", "bf16", "--draft-bits", 3, 2)
    assert [path.name for path in sorted((tmp_path / "chosen").glob("draft-*.bin"))] == ["draft-2.bin", "draft-3.bin"]
    cli("prepare", source, tmp_path / "small", "--experts", "int4")
    assert not list((tmp_path / "small").glob("draft-*"))


@pytest.mark.parametrize(("arguments", "message"), [
    (("chat", "--depth", "99", "--prompt", "hi"), "depth '99' is not possible"),
    (("chat", "--mode", "specter", "--draft-bits", "3", "--prompt", "hi"), "has no 3-bit draft: make one with"),
    (("plan", "--draft-bits", "5"), "invalid choice: "),
])  # fmt: skip
def test_a_bad_argument_is_one_line(arguments, message, own_store, capsys):
    command, *rest = arguments
    assert main([command, str(own_store()), *rest]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
