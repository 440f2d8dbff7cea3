"""Preparing a model runs by itself, says how far it is, and can be cancelled; the picker shows what there is."""

from __future__ import annotations

import threading
import time

import pytest

from app import models
from app.models import Preparing, State


def ended(preparing: Preparing) -> State:
    end = time.monotonic() + 5
    while preparing.running:
        assert time.monotonic() < end
        time.sleep(0.01)
    return preparing.state


def test_a_model_is_prepared_and_then_offered(backend):
    backend.quantise = threading.Event()
    preparing = Preparing(backend)
    assert preparing.start(" owner/Some-MoE ", "int8") == ""
    assert "being prepared" in preparing.start("other/model", "int4")
    backend.quantise.set()
    assert ended(preparing).phase == "done"
    assert ("owner--Some-MoE-int8 · 306 MiB", "owner--Some-MoE-int8") in models.choices(backend)


def test_cancelling_and_failing_are_said(backend):
    backend.quantise = threading.Event()
    preparing = Preparing(backend)
    assert "hub id" in preparing.start("  ", "int4")
    preparing.start("owner/model", "int4")
    preparing.cancel()
    assert ended(preparing).phase == "cancelled"
    preparing.start("missing/model", "int4")
    assert ended(preparing).phase == "failed" and "check the spelling" in preparing.state.text
    assert 'class="or-job failed"' in models.progress_html(preparing.state)
    assert models.progress_html(State()) == ""


def test_progress_has_a_share_and_the_time_left(backend, monkeypatch):
    now = [10.0]
    monkeypatch.setattr(models.time, "monotonic", lambda: now[0])
    preparing = Preparing(backend)
    preparing._report(backend.Progress("Fetching", 0, 1000, "experts"))
    now[0] = 40.0
    preparing._report(backend.Progress("Fetching", 250, 1000, "experts"))
    assert preparing.state.text == "Fetching: 250 of 1,000 experts, about 90 s left".replace("90 s", "2 min")
    assert preparing.state.fraction == 0.25 and "width:25.0%" in models.progress_html(preparing.state)


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (45, "45 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_are_no_finer_than_people_care_for(seconds, words):
    assert models.duration(seconds) == words


def test_store_names_are_safe_and_tell_owners_apart(tmp_path):
    assert models.store_name("Qwen/Qwen3-30B-A3B", "int4") == "Qwen--Qwen3-30B-A3B-int4"
    assert models.store_name(str(tmp_path) + "/", "bf16") == f"{tmp_path.name}-bf16"
    assert models.store_name("C:\\models\\My Model\\", "int8") == "My-Model-int8"
    assert models.store_name("../..", "int4").endswith("-int4") and "/" not in models.store_name("../..", "int4")


def test_the_picker_offers_the_default_even_before_it_is_there(backend):
    backend.models.clear()
    assert models.choices(backend) == [("SmolMoE (default, fetched when chosen)", "default")]
    assert models.about(backend, "default") == "" and models.about(backend, None) == ""
