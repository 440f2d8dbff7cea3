"""The line in front of the engine: order, stopping, settings between replies, and what a failure leaves behind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fake_engine import MIB, TOTAL, FakeBackend

from app.desk import OPENED, Desk, Turn, describe
from app.panels import Meter


@pytest.fixture
def desk(backend: FakeBackend) -> Iterator[Desk]:
    desk = Desk(backend, Meter())
    yield desk
    desk.close()


def loaded(desk: Desk, **config) -> Desk:
    ticket = desk.load(desk.backend.EngineConfig(**config))
    assert ticket.done.wait(5) and not ticket.error
    return desk


def ask(desk: Desk, text: str, on_end: Callable[[Turn], None] = lambda turn: None, **generation) -> Turn:
    return desk.reply([{"role": "user", "content": text}], desk.backend.GenerationConfig(**generation), on_end)


def begun(turn: Turn) -> Turn:
    end = time.monotonic() + 5
    while not turn.text:
        assert time.monotonic() < end
        time.sleep(0.005)
    return turn


def test_one_reply_at_a_time_in_the_order_of_asking(desk):
    loaded(desk)
    ends: list[Turn] = []
    first = begun(ask(desk, "long", ends.append))
    second, third = ask(desk, "short", ends.append), ask(desk, "short", ends.append)
    assert [desk.position(turn) for turn in (first, second, third)] == [0, 1, 2]
    assert desk.waiting == 2 and desk.turn is first
    desk.stop(first)
    assert third.done.wait(5)
    assert ends == [first, second, third] and desk.waiting == 0
    assert (first.finish_reason, second.finish_reason) == ("stopped", "stop")
    assert second.text == "A short answer. " and second.stats.completion_tokens == 3


def test_a_waiting_reply_leaves_the_line_at_once_and_never_reaches_the_engine(desk):
    loaded(desk)
    first = begun(ask(desk, "long"))
    second = ask(desk, "short")
    desk.stop(second)
    assert second.done.is_set() and second.finish_reason == "stopped" and not second.text
    desk.stop(first)
    assert first.done.wait(5) and len(desk.backend.requests) == 1


def test_settings_come_before_waiting_replies_and_after_the_running_one(desk):
    loaded(desk)
    first = begun(ask(desk, "long"))
    second = ask(desk, "long")
    change = desk.configure(expert_memory=16 * MIB)
    assert desk.engine.plan.expert_budget_bytes == TOTAL // 2 and not change.done.is_set()
    version = desk.version
    desk.stop(first)
    assert change.done.wait(5) and not change.error and not second.done.is_set()
    assert desk.engine.plan.expert_budget_bytes == 16 * MIB and desk.version > version


def test_settings_come_into_force_in_the_order_they_were_asked_for(desk):
    loaded(desk)
    modes = desk.backend.Mode
    turn = begun(ask(desk, "long"))
    changes = [desk.configure(mode=modes.EDGE0), desk.configure(lora=False), desk.configure(mode=modes.ON_DEMAND)]
    assert desk.asked == {"mode": modes.ON_DEMAND, "lora": False}
    desk.stop(turn)
    assert all(change.done.wait(5) for change in changes) and desk.asked == {}
    assert (desk.engine.config.mode, desk.engine.config.lora) == (modes.ON_DEMAND, False)


def test_pages_learn_of_a_change_when_it_is_asked_for_and_when_it_is_settled(desk):
    desk.backend.no_heads = "this model has no prerouter heads"
    loaded(desk)
    assert desk.modes["on-demand"] is None and desk.modes["edge0"] == "this model has no prerouter heads"
    turn, before = begun(ask(desk, "long")), desk.version
    change = desk.configure(mode=desk.backend.Mode.EDGE0)
    asked = desk.version
    assert asked > before
    desk.stop(turn)
    assert change.done.wait(5) and "no prerouter heads" in change.error and desk.version > asked and desk.asked == {}


def test_settings_that_do_not_fit_are_refused_with_the_engines_own_words(desk):
    loaded(desk)
    change = desk.configure(expert_memory=1)
    assert change.done.wait(5) and "below the least that works" in change.error
    assert desk.engine.plan.expert_budget_bytes == TOTAL // 2


def test_an_error_ends_the_reply_and_keeps_its_text(desk):
    loaded(desk)
    turn = ask(desk, "broken")
    assert turn.done.wait(5) and "reading experts.bin failed" in turn.error and turn.text.startswith("A **Mixture")
    after = ask(desk, "short")
    assert after.done.wait(5) and not after.error


def test_without_a_model_a_reply_says_why(desk):
    turn = ask(desk, "short")
    assert turn.done.wait(5) and "No model is loaded: choose one" in turn.error
    desk.backend.load_error = "store.json is damaged: prepare the model again"
    assert desk.load(desk.backend.EngineConfig()).done.wait(5)
    assert (desk.status.phase, desk.status.model) == ("failed", "SmolMoE")
    turn = ask(desk, "short")
    assert turn.done.wait(5) and "store.json is damaged" in turn.error


def test_a_model_that_cannot_be_found_leaves_the_old_one_in_use(desk):
    loaded(desk)
    engine, desk.backend.plan_error = desk.engine, "no model 'nowhere'"
    ticket = desk.load(desk.backend.EngineConfig(model="nowhere"))
    assert ticket.done.wait(5) and "no model 'nowhere'" in ticket.error
    assert desk.engine is engine and not engine.closed and desk.status.phase == "ready"


def test_replacing_a_model_closes_the_old_one_first(desk):
    old = loaded(desk).engine
    new = loaded(desk, model="smolmoe-int4").engine
    assert old.closed and not new.closed and desk.status.model == "smolmoe-int4"


def test_a_reply_that_the_template_begins_inside_reasoning_says_so(desk):
    loaded(desk)
    turn = ask(desk, "short template")
    assert turn.done.wait(5) and turn.text == OPENED + "A short answer. "


def test_what_nobody_foresaw_is_logged_without_the_chats_words(desk, caplog):
    loaded(desk)

    def fail(turn: Turn) -> None:
        raise ZeroDivisionError(turn.messages[-1]["content"])

    with caplog.at_level(logging.ERROR):
        turn = ask(desk, "a short secret", fail)
        assert turn.done.wait(5)
    assert "a short secret" in turn.error
    assert "ZeroDivisionError" in caplog.text and "secret" not in caplog.text


def test_figures_are_the_last_ones_while_the_engine_is_being_changed(desk):
    loaded(desk)
    before = desk.figures()
    inside, go_on = threading.Event(), threading.Event()
    configure = desk.engine.configure

    def slow(**changes) -> None:
        inside.set()
        go_on.wait(5)
        configure(**changes)

    desk.engine.configure = slow
    change = desk.configure(expert_memory=16 * MIB)
    assert inside.wait(5) and desk.figures() is before
    go_on.set()
    assert change.done.wait(5) and desk.figures().stats.expert_budget_bytes == 16 * MIB


def test_closing_ends_the_running_reply(backend):
    desk = loaded(Desk(backend, Meter()))
    turn, engine = begun(ask(desk, "long")), desk.engine
    desk.close()
    assert turn.done.is_set() and turn.finish_reason == "stopped" and engine.closed


def test_progress_is_described_for_people(backend):
    assert describe(backend.Progress("Fetching", 31_000_000, 93_000_000, "bytes")) == ("Fetching: 31 of 93 MB", 1 / 3)
    assert describe(backend.Progress("Quantising", 12, 2400, "experts")) == ("Quantising: 12 of 2,400 experts", 0.005)
    assert describe(backend.Progress("Looking", 0, 0, "bytes")) == ("Looking", None)
