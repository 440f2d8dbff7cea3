"""The page in a real browser: what a person sees and clicks, over the stand-in engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeBackend

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from browsing import choice, reply, said, say, serving, stop_button, wait_done, wait_until  # noqa: E402
from playwright.sync_api import expect  # noqa: E402

from app.history import Archive, Conversation, Message  # noqa: E402
from app.server import App  # noqa: E402
from app.share import Access  # noqa: E402


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[App, str]]:
    with serving(FakeBackend(), tmp_path_factory.mktemp("data")) as both:
        yield both


def test_chat_streams_panels_move_and_stop_stops(served, open_page):
    app, url = served
    page = open_page(url)
    backend = app.desk.backend
    before = len(backend.stopped)
    say(page, "Tell me a long story")
    expect(stop_button(page)).to_be_visible()
    expect(page.locator("#or-box textarea")).to_have_value("")
    expect(reply(page)).to_contain_text("Mixture-of-Experts")
    some = reply(page).first.inner_text()
    wait_until(lambda: len(reply(page).first.inner_text()) > len(some) + 40)  # it grows while it is written
    expect(page.locator("#or-status")).to_have_attribute("data-phase", "writing")
    figure = {name: page.locator(f"[data-part={name}]") for name in ("tok_s", "hit_rate", "peak", "read_per_token")}
    expect(figure["tok_s"]).to_have_text(re.compile(r"^\d+(\.\d)?$"))
    expect(figure["hit_rate"]).to_have_text("80.0 %")
    expect(figure["peak"]).to_have_text("294 MiB")
    expect(figure["read_per_token"]).to_have_text("4.8 MiB")
    expect(page.locator("[data-part=count-missed]")).not_to_have_text("0")
    assert page.evaluate("document.querySelector('canvas').width") > 100
    stop_button(page).click()
    wait_done(page)
    wait_until(lambda: len(backend.stopped) == before + 1)
    expect(reply(page).last).to_contain_text("stopped")
    expect(reply(page).last).to_contain_text("tok/s")


def test_budget_and_prefetch_change_without_a_reload_and_the_chat_goes_on(served, open_page):
    app, url = served
    page = open_page(url)
    engine = app.desk.engine
    said(page, "A short one")
    number = page.locator("#or-memory input[type=number]")
    assert (number.get_attribute("min"), number.get_attribute("max")) == ("2", "96")
    slider = page.locator("#or-memory input[type=range]")
    slider.fill("30")
    slider.press("ArrowRight")
    expect(page.locator("#or-plan")).to_contain_text("31.0 MiB")
    choice(page, "Nobody").click()
    expect(choice(page, "Nobody")).to_be_checked()
    wait_until(lambda: engine.config.prefetch == "none" and engine.plan.expert_budget_bytes == 31 * 2**20)
    assert app.desk.engine is engine
    say(page, "And another short one")
    expect(reply(page)).to_have_count(4)  # two replies and the line of figures below each
    wait_done(page)


def test_second_tab_waits_in_sight_and_closing_a_tab_ends_its_reply(served, open_page):
    app, url = served
    backend = app.desk.backend
    first, second, third = open_page(url), open_page(url), open_page(url)
    say(first, "A long story for the first")
    expect(reply(first)).to_contain_text("Mixture")
    say(second, "A short one for the second")
    expect(reply(second)).to_contain_text("Waiting, position 1")
    say(third, "A long one for the third")
    expect(reply(third)).to_contain_text("Waiting, position 2")
    expect(first.locator("#or-status")).to_contain_text("2 waiting")
    assert "for the first" not in second.locator("#or-chat").inner_text()
    before = len(backend.stopped)
    third.close()  # gives up its place
    expect(first.locator("#or-status")).to_contain_text("1 waiting")
    first.close()  # ends its reply, and the next one's turn comes
    wait_until(lambda: len(backend.stopped) == before + 1)
    expect(reply(second).first).to_contain_text("A short answer.")
    wait_done(second)


def test_regenerate_and_edit(served, open_page):
    app, url = served
    page = open_page(url)
    requests = app.desk.backend.requests
    said(page, "First a short question")
    page.get_by_label("Retry").click()
    wait_until(lambda: [m["content"] for m in requests[-1][0]] == ["First a short question"] and not app.desk.turn)
    wait_done(page)
    expect(reply(page)).to_have_count(2)
    page.get_by_label("Edit").first.click()
    box = page.locator("#or-chat textarea")
    box.fill("A changed short question")
    page.get_by_label("Submit").click()
    wait_until(lambda: [m["content"] for m in requests[-1][0]] == ["A changed short question"])
    wait_done(page)
    expect(page.locator("#or-chat [data-testid=user]")).to_have_count(1)
    expect(page.locator("#or-chat [data-testid=user]")).to_contain_text("A changed short question")


def test_reasoning_is_folded_and_settings_reach_the_engine(served, open_page):
    app, url = served
    page = open_page(url)
    page.get_by_role("tab", name="Reply").click()
    page.fill("#or-system textarea", "Be brief.")
    page.fill("#or-max-tokens input", "40")
    say(page, "Please think")
    expect(page.locator("#or-chat .thought-group").first).to_contain_text("Thought for")
    wait_done(page)
    assert "weigh what to say" not in page.locator("#or-chat").inner_text()
    page.locator("#or-chat .thought-group .title").first.click()
    expect(page.locator("#or-chat")).to_contain_text("weigh what to say")
    expect(reply(page).last).to_contain_text("token limit reached")
    messages, generation = app.desk.backend.requests[-1]
    assert messages[0] == {"role": "system", "content": "Be brief."} and generation.max_tokens == 40


def test_errors_are_shown_and_nothing_typed_is_lost(served, open_page):
    app, url = served
    page = open_page(url)
    say(page, "This one is broken")
    expect(page.locator("#or-notice")).to_contain_text("reading experts.bin failed")
    expect(page.locator("#or-chat [data-testid=user]")).to_contain_text("This one is broken")
    asked = len(app.desk.backend.requests)
    page.get_by_role("button", name="Ask again").click()
    wait_until(lambda: len(app.desk.backend.requests) == asked + 1)
    expect(page.locator("#or-notice")).to_contain_text("reading experts.bin failed")
    expect(page.locator("#or-chat [data-testid=user]")).to_have_count(1)
    page.get_by_role("tab", name="Reply").click()
    page.fill("#or-max-tokens input", "0")
    say(page, "Kept in the box")
    expect(page.locator("#or-notice")).to_contain_text("max tokens 0 is too small")
    expect(page.locator("#or-box textarea")).to_have_value("Kept in the box")


def test_history_survives_a_restart_and_can_be_exported_and_deleted(open_page, tmp_path):
    with serving(FakeBackend(), tmp_path) as (_, url):
        page = open_page(url)
        said(page, "Remember this short talk")
        page.reload()
        expect(page.locator("#or-chat")).to_contain_text("A short answer.")  # the tab comes back to where it was
    with serving(FakeBackend(), tmp_path) as (_, url):
        page = open_page(url)
        expect(page.locator("#or-chat [data-testid=bot]")).to_have_count(0)
        page.locator(".or-row", has_text="Remember this").click()
        expect(page.locator("#or-chat")).to_contain_text("A short answer.")
        with page.expect_download() as download:
            page.get_by_role("button", name="Markdown").click()
        text = Path(download.value.path()).read_text(encoding="utf-8")
        assert download.value.suggested_filename == "outrider-remember-this-short-talk.md"
        assert "Remember this short talk" in text and "A short answer." in text
        page.on("dialog", lambda dialog: dialog.accept())
        page.locator(".or-row").hover()
        page.locator(".or-delete").click()
        expect(page.locator(".or-row")).to_have_count(0)
        expect(page.locator("#or-chat [data-testid=bot]")).to_have_count(0)


def test_a_model_that_fails_to_load_is_explained_in_the_page(open_page):
    with serving(FakeBackend(load_error="models/default/store.json is damaged: prepare the model again")) as (_, url):
        page = open_page(url, ready=False)
        expect(page.locator("#or-failure")).to_contain_text("store.json is damaged")
        say(page, "Anything")
        expect(page.locator("#or-notice")).to_contain_text("store.json is damaged")
        expect(page.locator("#or-chat [data-testid=user]")).to_contain_text("Anything")


def test_nothing_a_person_or_a_model_writes_is_fetched_or_run(served, open_page):
    _, url = served
    page = open_page(url)
    said(page, "short ![x](https://example.org/x.png) <img src=https://example.org/y.png onerror=alert(1)>")
    page.wait_for_timeout(300)  # open_page's listener fails the test if anything was asked for


def test_page_opens_before_the_model_and_models_can_be_prepared_and_switched(open_page, tmp_path):
    download = threading.Event()
    quantise = threading.Event()
    backend = FakeBackend(download=download, quantise=quantise, MODELS_DIR=tmp_path)
    with serving(backend) as (app, url):
        page = open_page(url, ready=False)
        expect(page.locator("#or-status")).to_contain_text("Downloading SmolLM2: 31 of 93 MB")
        say(page, "A short question before the model is there")
        expect(reply(page)).to_contain_text("Waiting, position 1 (Downloading")
        download.set()
        expect(reply(page).first).to_contain_text("A short answer.")
        expect(page.locator("#or-status")).to_have_attribute("data-phase", "ready")
        page.get_by_role("tab", name="Model").click()
        page.fill("#or-source input, #or-source textarea", "Qwen/Qwen3-30B-A3B")
        page.click("#or-prepare")
        expect(page.locator("#or-job")).to_contain_text("Quantising experts")
        page.click("#or-cancel")
        expect(page.locator("#or-job")).to_contain_text("Cancelled")
        page.fill("#or-source input, #or-source textarea", "missing/model")
        page.click("#or-prepare")
        expect(page.locator("#or-job")).to_contain_text("neither a folder nor a model on the hub")
        page.fill("#or-source input, #or-source textarea", "some/Tiny-MoE")
        page.click("#or-prepare")
        quantise.set()
        expect(page.locator("#or-job")).to_contain_text("some--Tiny-MoE-int4 is ready")
        page.click("#or-model input")
        page.get_by_role("option", name="some--Tiny-MoE-int4").click()
        page.click("#or-load")
        wait_until(lambda: app.desk.engine is not None and app.desk.engine.config.model == "some--Tiny-MoE-int4")
        expect(page.locator("#or-status b")).to_have_text("some--Tiny-MoE-int4")


def test_a_password_guards_a_shared_app_and_people_do_not_see_each_other(open_page, tmp_path):
    access = Access((("ada", "secret-a"), ("guest", "secret-g")), remote=True)
    private = Conversation(messages=[Message("user", "private")], title="A private talk of the owner")
    Archive(tmp_path, "guest").of(None).save(private)
    with serving(FakeBackend(), tmp_path, access) as (_, url):
        page = open_page(url, ready=False)
        assert page.request.get(f"{url}gradio_api/info").status == 401
        assert page.request.get(f"{url}config").status == 401
        for user, password in (("ada", "wrong"), ("ada", "secret-a")):
            page.get_by_label("username").fill(user)
            page.get_by_label("password").fill(password)
            page.get_by_role("button", name="Login").click()
            page.wait_for_timeout(300)
        expect(page.locator("#or-status")).to_have_attribute("data-phase", "ready")
        expect(page.locator("#or-box textarea")).to_be_enabled()
        expect(page.locator(".or-row")).to_have_count(0)
        page.get_by_role("tab", name="Model").click()
        expect(page.locator("#or-right")).to_contain_text("can be prepared only when")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_layout_fits_the_window(served, open_page, theme):
    _, url = served
    page = open_page(url, color_scheme=theme)
    assert page.evaluate("document.body.classList.contains('dark')") is (theme == "dark")
    for width in (1440, 900, 390):
        page.set_viewport_size({"width": width, "height": 844})
        expect(page.locator("#or-box textarea")).to_be_in_viewport()
        expect(page.locator("#or-right")).to_be_visible(visible=width > 1000)
        expect(page.locator("#or-left")).to_be_visible(visible=width > 800)
        if width < 1000:
            page.get_by_label("Engine panel").click()
        expect(page.locator("[data-part=peak]")).to_be_in_viewport()
        if width < 1000:
            page.get_by_label("Engine panel").click()
        if width < 800:
            page.get_by_label("Conversations").click()
        expect(page.locator("#or-new")).to_be_in_viewport()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
