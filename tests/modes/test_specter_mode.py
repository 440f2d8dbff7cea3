"""Specter mode is entered, changed and left without a trace; what it cannot be is refused with the way out."""

from __future__ import annotations

import json

import pytest
import torch

from engine import ConfigError, EngineConfig, Mode, PlanError
from engine.cli import main
from engine.engine import plan
from engine.store.draft import draft_bytes
from engine.store.layout import read_info
from tests.edge0 import put_heads
from tests.specter import divergence, drafted_copy, memory
from tests.streaming import PROMPT, error_of, greedy, open_engine, streamed


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


@pytest.mark.parametrize("depth", [0, 3, "auto"])
def test_a_forced_reply_is_verified_in_windows(depth, drafted, plain, specter):
    wanted = plain().force(PROMPT, PROMPT[::-1])
    got = specter(drafted(), depth=depth).force(PROMPT, PROMPT[::-1])
    assert got.shape == wanted.shape and error_of(got, wanted) < 1e-4


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


# -- what is planned and refused -----------------------------------------------------------------------------------------


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


# -- the command line ----------------------------------------------------------------------------------------------------


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
