"""However a reply in Specter mode ends, what was said is what plain decoding says, and the next one is whole."""

from __future__ import annotations

import json
import os
import threading

import pytest

from engine import GenerationConfig, ReadError
from tests.specter import GREEDY, LONG, divergence, drafted_copy, reply
from tests.streaming import PROMPT, REPETITION, greedy, open_engine, out_of_luck, streamed

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


# -- faults --------------------------------------------------------------------------------------------------------------


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
