"""Figures are the engine's own, formatted; what is unknown is a dash; the plan's bar adds up."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import EXPERTS, LAYERS, MIB, TOTAL, FakeBackend

from app import panels
from app.desk import Desk
from app.panels import Meter
from engine import EngineStats, GenerationConfig, Mode


def test_unknown_figures_are_dashes_and_known_ones_have_units():
    assert set(panels.figures(None).values()) == {panels.DASH, "RAM in use"}
    fresh = panels.figures(EngineStats())
    assert (fresh["tok_s"], fresh["hit_rate"], fresh["ttft"], fresh["rss"]) == (panels.DASH,) * 4
    shown = panels.figures(EngineStats(
        tok_s=12.345, ttft_s=0.4321, hit_rate=0.9314, hidden_io=0.5, bytes_read=30 * MIB, completion_tokens=10,
        peak_active_bytes=300 * MIB, rss_bytes=2**30, active_bytes_by_kind={"resident": MIB, "experts": 2 * MIB},
        hits=1200, misses=3))  # fmt: skip
    assert shown["tok_s"] == "12.3" and shown["ttft"] == "432 ms" and shown["hit_rate"] == "93.1 %"
    assert shown["read_per_token"] == "3.0 MiB" and shown["peak"] == "300 MiB" and shown["rss"] == "1.0 GiB"
    assert (shown["memory"], shown["memory_kind"]) == ("3.0 MiB", "RAM in use")
    assert shown["asked"] == "1,200 ready, 0 late, 3 missed"
    on_gpu = panels.figures(EngineStats(device_memory_bytes=5 * MIB, active_bytes_by_kind={"resident": MIB}))
    assert (on_gpu["memory"], on_gpu["memory_kind"]) == ("5.0 MiB", "VRAM in use")


def test_the_line_below_a_reply_has_tokens_ttft_rate_peak_and_reads():
    stats = EngineStats(completion_tokens=10, ttft_s=1.5, tok_s=4.0, peak_active_bytes=300 * MIB, bytes_read=20 * MIB)
    summary = panels.summarise(stats)
    assert summary["line"] == ("10 tokens · first after 1.5 s · 4.0 tok/s · peak active 300 MiB · "
                               "read 20.0 MiB (2.0 MiB per token) · On demand")  # fmt: skip
    json.dumps(summary)


def test_what_a_forecast_did_is_shown_where_there_was_one():
    asked = {"hits": 90, "late": 4, "misses": 6}
    alone = panels.figures(EngineStats(**asked))
    assert (alone["late"], alone["agreement"]) == (panels.DASH, panels.DASH)
    assert panels.figures(EngineStats(**asked, prefetch="gate"))["late"] == "4.0 %"
    assert panels.figures(EngineStats(prefetch="gate"))["late"] == panels.DASH  # nothing was asked for yet
    heads = panels.figures(EngineStats(**asked, mode="edge0", routing="prerouter", forecast_agreement=0.8125))
    assert (heads["late"], heads["agreement"]) == ("4.0 %", "81.2 %")


def test_the_time_of_a_token_goes_with_the_rate():
    shown = [panels.figures(EngineStats(tok_s=rate))["tpot"] for rate in (None, 0.0, 0.4, 19.7, 250.0)]
    assert shown == [panels.DASH, panels.DASH, "2,500 ms", "51 ms", "4.0 ms"]


def test_the_drafts_panel_is_there_in_specter_only_and_what_is_unknown_is_a_dash():
    assert panels.drafting(None) is None and panels.drafting(EngineStats()) is None
    fresh = panels.drafting(EngineStats(mode="specter"))
    dashes = ("draft_depth", "accepted", "recall", "draft_share", "verify_share", "stall_share")
    assert fresh["figures"] == {"link": "SSD", **dict.fromkeys(dashes, panels.DASH)}
    assert (fresh["accepted"], fresh["positions"], fresh["split"], fresh["parked"]) == ([], [], None, False)


def test_the_drafts_panel_has_its_figures_histograms_and_where_the_time_went():
    shown = panels.drafting(EngineStats(
        mode="specter", draft_depth=3, accepted_per_window=(2, 0, 1, 5), acceptance_by_position=(0.75, 1.0, 0.83333),
        forecast_recall=0.934, draft_s=1.0, verify_s=3.0, stall_s=0.5, link="emulated"))  # fmt: skip
    assert shown["figures"] == {"draft_depth": "3", "accepted": "2.1", "recall": "93.4 %", "link": "Emulated",
                                "draft_share": "25 %", "verify_share": "62 %", "stall_share": "12 %"}  # fmt: skip
    assert shown["accepted"] == [0.25, 0.0, 0.125, 0.625] and shown["positions"] == [0.75, 1.0, 0.833]
    assert shown["split"] == [0.25, 0.625, 0.125]
    plain = panels.drafting(EngineStats(mode="specter", draft_depth=0, draft_parked=True, link="pcie"))
    assert plain["parked"] and (plain["figures"]["draft_depth"], plain["figures"]["link"]) == ("0, plain", "PCIe")
    late = panels.drafting(EngineStats(mode="specter", draft_s=1.0, verify_s=1.0, stall_s=9.0))
    assert late["split"] == [0.5, 0.0, 0.5]  # reading the prompt waited too; checking waits for no longer than it takes


def test_a_reply_of_specter_keeps_what_the_draft_did():
    stats = EngineStats(mode="specter", draft_bits=4, accepted_per_window=(1, 2), forecast_recall=0.9)
    summary = json.loads(json.dumps(panels.summarise(stats)))
    assert summary["line"].endswith("Specter with a 4-bit draft")
    assert (summary["draft_bits"], summary["accepted_per_window"], summary["forecast_recall"]) == (4, [1, 2], 0.9)
    assert "draft_bits" not in panels.summarise(EngineStats())


def test_the_meter_follows_the_rate_with_two_samples_a_second():
    now = [100.0]
    meter = Meter(clock=lambda: now[0])
    meter.begin()
    for _ in range(100):  # 20 tokens a second for 5 s
        now[0] += 0.05
        meter.add(1)
    rates = meter.series()
    assert 8 <= len(rates) <= 10 and all(rate == pytest.approx(20, rel=0.02) for rate in rates)
    for _ in range(10):  # then one every two seconds
        now[0] += 2
        meter.add(1)
    assert meter.series()[-1] == pytest.approx(0.5, rel=0.02)
    meter.begin()
    assert meter.series() == []


def test_the_meter_is_not_misled_by_tokens_that_come_together():
    now = [0.0]
    meter = Meter(clock=lambda: now[0])
    for pause in (0.2, 2.0):
        meter.begin()
        for _ in range(20):  # windows of 6 tokens, handed on one by one
            now[0] += pause
            for _ in range(6):
                now[0] += 0.0005
                meter.add(1)
        rates = meter.series()
        assert len(rates) > 5 and all(rate == pytest.approx(6 / pause, rel=0.02) for rate in rates)


def test_the_heat_map_is_one_byte_a_cell_in_row_order():
    states = np.arange(6, dtype=np.uint8).reshape(2, 3) % 5
    cells = panels.cells(states)
    assert (cells["rows"], cells["columns"]) == (2, 3)
    assert base64.b64decode(cells["states"]) == states.tobytes()
    assert len(panels.STATES) == 5


def test_live_is_small_and_follows_the_desk(backend):
    desk = Desk(backend, Meter())
    assert panels.live(desk)["phase"] == "empty" and panels.live(desk)["cells"] is None
    assert desk.load(backend.EngineConfig()).done.wait(5)
    shown = panels.live(desk)
    assert (shown["phase"], shown["status"], shown["model"]) == ("ready", "Ready", "SmolMoE")
    assert (shown["cells"]["rows"], shown["cells"]["columns"]) == (LAYERS, EXPERTS)
    assert len(json.dumps(shown)) < 1500 + 1.4 * LAYERS * EXPERTS
    desk.close()


def test_when_the_draft_is_given_up_the_pages_are_told(backend):
    desk = Desk(FakeBackend(parks=True), Meter())
    assert desk.load(desk.backend.EngineConfig(mode=Mode.SPECTER)).done.wait(5)
    before = panels.live(desk)
    assert not before["draft"]["parked"]
    turn = desk.reply([{"role": "user", "content": "Tell me"}], GenerationConfig(max_tokens=9), lambda turn: None)
    assert turn.done.wait(10) and not turn.error
    after = panels.live(desk)
    assert after["draft"]["parked"] and after["version"] != before["version"]
    assert panels.live(desk)["version"] == after["version"]
    desk.close()


def widths(html: str) -> dict[str, float]:
    return {name: float(share) for name, share in re.findall(r'or-seg ([a-z ]+)" style="flex:([0-9.]+)', html)}


def test_the_plans_bar_is_to_scale_and_says_what_is_left():
    plan = FakeBackend().plan(FakeBackend.EngineConfig(expert_memory=48 * MIB))
    html = panels.plan_bar(replace(plan, available_bytes=400 * MIB))
    shares = widths(html)
    assert shares["experts"] == pytest.approx(48 / 400, abs=1e-3)
    assert shares["free"] == pytest.approx(106 / 400, abs=1e-3)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert "294 MiB planned of 400 MiB available" in html and "does not fit" not in html
    assert "Draft" not in html
    drafts = FakeBackend().plan(FakeBackend.EngineConfig(expert_memory=48 * MIB, mode=Mode.SPECTER))
    shares = widths(panels.plan_bar(replace(drafts, available_bytes=400 * MIB)))
    # The draft is part of the memory for experts.
    assert (shares["experts"], shares["draft"]) == (pytest.approx(24 / 400, abs=1e-3),) * 2
    assert "24.0 MiB of the experts in memory, 72.0 MiB only on the disk" in panels.where_experts_are(drafts)
    roomy = widths(panels.plan_bar(plan))  # 8 GiB free: drawn short and hatched, so that the rest can be seen
    assert roomy["free cut"] == pytest.approx(0.25, abs=1e-3)
    assert "does not fit" in panels.plan_bar(replace(plan, fits=False))
    assert panels.plan_bar(None) and panels.where_experts_are(None) == ""


def test_the_reason_is_plain_and_fits_the_plan():
    backend = FakeBackend()
    some, all_ = (backend.plan(backend.EngineConfig(expert_memory=size)) for size in (TOTAL // 2, TOTAL))
    assert "only 8 of 32 experts" in panels.why(some) and "read when they are needed" in panels.why(some)
    assert "nothing is read" in panels.why(all_)
    assert "48.0 MiB of the experts in memory, 48.0 MiB only on the disk" in panels.where_experts_are(some)
