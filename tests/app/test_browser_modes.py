"""The mode switch in a real browser: changed while idle and during a reply, refused with the reason, and kept in sight."""

from __future__ import annotations

import re

import pytest
from fake_engine import FakeBackend

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from browsing import choice, reply, said, say, serving, stop_button, wait_done, wait_until  # noqa: E402
from playwright.sync_api import Page, expect  # noqa: E402


def chips(page: Page):
    return page.locator("#or-quality .or-chip")


def figures_line(mode: str) -> re.Pattern:
    return re.compile(
        r"\d+ tokens · first after .* · [\d.]+ tok/s · peak active 294 MiB · read \d.* per token\) · " + mode
    )


def test_the_mode_changes_without_a_reload_and_each_reply_says_its_own(open_page):
    with serving(FakeBackend()) as (app, url):
        page = open_page(url)
        engine, part = app.desk.engine, lambda name: page.locator(f"[data-part={name}]")
        expect(chips(page)).to_have_text(["bf16 experts", "own router"])
        said(page, "A short one")
        expect(reply(page).last).to_have_text(figures_line("On demand"))
        expect(part("agreement")).to_have_text("–")
        choice(page, "Edge0").click()
        expect(choice(page, "Edge0")).to_be_checked()
        expect(chips(page)).to_have_text(["bf16 experts", "prerouter routing", "recovery LoRA"])
        expect(page.locator("#or-modes")).to_contain_text("The prerouter heads")
        expect(choice(page, "Nobody")).to_have_count(0)
        said(page, "Another short one")
        expect(reply(page).last).to_have_text(figures_line("Edge0 with LoRA"))
        expect(part("agreement")).to_have_text("87.1 %")
        expect(part("late")).to_have_text("4.9 %")
        expect(part("hidden_io")).to_have_text("80.0 %")
        page.get_by_role("switch", name="Recovery LoRA").click()
        expect(page.get_by_role("switch", name="Recovery LoRA")).not_to_be_checked()
        expect(chips(page)).to_have_text(["bf16 experts", "prerouter routing", "LoRA off"])
        said(page, "A third short one")
        expect(reply(page).last).to_have_text(figures_line("Edge0 without LoRA"))
        choice(page, "Edge0").press("ArrowUp")
        expect(choice(page, "On demand")).to_be_checked()
        expect(choice(page, "On demand")).to_be_focused()
        choice(page, "Nobody").click()
        wait_until(lambda: engine.config.prefetch == "none")
        said(page, "A fourth short one")
        expect(part("late")).to_have_text("–")  # nobody looked ahead
        assert app.desk.engine is engine and len(app.desk.backend.requests) == 4


def test_a_change_asked_for_during_a_reply_is_shown_and_comes_after_it(open_page):
    with serving(FakeBackend()) as (app, url):
        page, other = open_page(url), open_page(url)
        say(page, "A long story")
        expect(reply(page)).to_contain_text("Mixture")
        choice(page, "Edge0").click()
        expect(page.locator("#or-mode-notice")).to_have_text("In force after the present reply.")
        for each in (page, other):
            expect(choice(each, "Edge0")).to_be_checked()
            expect(chips(each)).to_have_text(["bf16 experts", "own router"])  # what is in force
        page.get_by_role("switch", name="Recovery LoRA").click()
        expect(page.get_by_role("switch", name="Recovery LoRA")).not_to_be_checked()
        assert app.desk.turn is not None and app.desk.engine.config.mode.value == "on-demand"
        stop_button(page).click()
        wait_done(page)
        expect(reply(page).last).to_contain_text("On demand")
        for each in (page, other):
            expect(chips(each)).to_have_text(["bf16 experts", "prerouter routing", "LoRA off"])
        expect(page.locator("#or-mode-notice")).to_have_text("")
        said(page, "A short one")
        expect(reply(page).last).to_contain_text("Edge0 without LoRA")


def test_specter_shows_what_its_draft_does_and_lets_its_depth_and_bits_be_chosen(open_page):
    with serving(FakeBackend()) as (app, url):
        page = open_page(url)
        engine, part = app.desk.engine, lambda name: page.locator(f"[data-part={name}]")
        draft, bars = page.locator("#or-draft"), lambda name: page.locator(f"[data-bars={name}] svg")
        expect(draft).to_be_hidden()
        choice(page, "Specter").click()
        expect(choice(page, "Specter")).to_be_checked()
        expect(choice(page, "Nobody")).to_have_count(0)
        expect(chips(page)).to_have_text(["bf16 experts", "own router", "4-bit draft"])
        expect(page.locator("#or-plan")).to_contain_text("Draft")
        expect(draft).to_be_visible()
        expect(part("recall")).to_have_text("–")
        expect(part("draft_share")).to_have_text("–")
        choice(page, "8 tokens").click()
        expect(choice(page, "8 tokens")).to_be_checked()
        expect(part("draft_depth")).to_have_text("8")
        choice(page, "4 bits").press("ArrowRight")
        expect(choice(page, "3 bits")).to_be_checked()
        expect(chips(page).last).to_have_text("3-bit draft")
        assert (engine.config.depth, engine.config.draft_bits) == (8, 3)
        say(page, "A long story")
        expect(part("recall")).to_have_text("93.4 %")  # while the reply is written
        expect(part("tpot")).to_have_text(re.compile(r"^[\d,]+(\.\d)? ms$"))
        expect(part("accepted")).to_have_text(re.compile(r"^\d\.\d$"))
        expect(part("link")).to_have_text("SSD")
        expect(bars("accepted")).to_have_attribute("aria-label", re.compile(r"^0: \d+ %, 1: 0 %, .*8: \d+ %$"))
        expect(bars("positions")).to_have_attribute("aria-label", re.compile(r"^1: 96 %, 2: 92 %, .*8: 72 %$"))
        for name, share in (("draft", 33), ("verify", 53), ("stall", 13)):
            expect(part(f"{name}_share")).to_have_text(f"{share} %")
        segments = draft.locator(".or-seg")
        widths = [segments.nth(i).bounding_box()["width"] for i in range(3)]
        assert widths[1] > widths[0] > widths[2] > 10
        assert app.desk.turn is not None
        stop_button(page).click()
        wait_done(page)
        expect(reply(page).last).to_contain_text("Specter with a 3-bit draft")
        choice(page, "On demand").click()
        expect(draft).to_be_hidden()
        expect(choice(page, "8 tokens")).to_have_count(0)
        expect(page.locator("#or-plan")).not_to_contain_text("Draft")
        said(page, "A short one")
        expect(reply(page).last).to_have_text(figures_line("On demand"))
        assert app.desk.engine is engine


def test_a_draft_that_does_not_pay_is_given_up_in_one_calm_sentence(open_page):
    with serving(FakeBackend(parks=True)) as (_, url):
        page = open_page(url)
        choice(page, "Specter").click()
        expect(page.locator("#or-plan")).to_contain_text("Draft")
        expect(page.locator("#or-draft [data-part=parked]")).to_be_hidden()
        said(page, "Tell me")
        expect(page.locator("#or-draft [data-part=parked]")).to_have_text(
            "Drafting ahead does not pay here, so its memory went to the experts.")  # fmt: skip
        expect(page.locator("#or-draft .or-bar")).to_be_hidden()
        expect(page.locator("[data-part=draft_depth]")).to_have_text("0, plain")
        expect(page.locator("#or-plan")).not_to_contain_text("Draft")
        expect(page.locator("#or-quality .or-chip.off")).to_have_text("4-bit draft")
        choice(page, "4 tokens").click()  # a depth that is asked for is kept to
        expect(page.locator("#or-draft [data-part=parked]")).to_be_hidden()
        expect(page.locator("[data-part=draft_depth]")).to_have_text("4")


def test_a_mode_that_cannot_be_had_is_disabled_with_the_reason(open_page):
    reason = "this model has no prerouter heads: train them with `python -m engine train default`"
    with serving(FakeBackend(no_heads=reason, no_draft="this model has no draft")) as (app, url):
        page = open_page(url)
        expect(choice(page, "Edge0")).to_be_disabled()
        expect(choice(page, "Specter")).to_be_disabled()
        expect(page.locator("#or-modes")).to_contain_text("this model has no draft")
        expect(page.locator("#or-modes")).to_contain_text("train them with python -m engine train default")
        choice(page, "On demand").press("ArrowDown")  # there is nowhere to go
        expect(choice(page, "On demand")).to_be_checked()
        page.locator("#or-modes [data-value=edge0]").evaluate("button => button.disabled = false")
        choice(page, "Edge0").click()  # a page that was opened before: the engine itself refuses
        expect(page.locator("#or-mode-notice")).to_contain_text("no prerouter heads")
        expect(choice(page, "On demand")).to_be_checked()
        assert app.desk.engine.config.mode.value == "on-demand"


def test_heads_without_a_lora_say_so(open_page):
    with serving(FakeBackend(no_lora=True)) as (_, url):
        page = open_page(url)
        choice(page, "Edge0").click()
        expect(chips(page)).to_have_text(["bf16 experts", "prerouter routing", "LoRA off"])
        expect(page.get_by_role("switch", name="Recovery LoRA")).to_be_disabled()
        expect(page.locator("#or-modes")).to_contain_text("came without one")


def test_the_line_below_a_reply_comes_back_after_a_restart(open_page, tmp_path):
    with serving(FakeBackend(), tmp_path) as (_, url):
        page = open_page(url)
        choice(page, "Edge0").click()
        expect(chips(page)).to_have_count(3)
        said(page, "Remember this short talk")
        line = reply(page).last.inner_text()
    with serving(FakeBackend(), tmp_path) as (_, url):
        page = open_page(url)
        page.locator(".or-row", has_text="Remember this").click()
        expect(reply(page).last).to_have_text(figures_line("Edge0 with LoRA"))
        assert reply(page).last.inner_text() == line
