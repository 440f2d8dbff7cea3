"""Fixtures of the app's tests: a stand-in engine, the app over it, and a headless Chromium where there is one."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeBackend  # noqa: E402

# A quiet browser: no GPU, no services of its own that would look for a network.
CHROMIUM_ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    return FakeBackend(MODELS_DIR=tmp_path / "models")


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium for a module's tests; skips with the reason where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium found: install Debian's chromium, or run `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=found, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable]:
    """Opens pages, each as another visitor; fails the test when one reports an error or fetches from elsewhere."""
    from playwright.sync_api import expect

    contexts, troubles = [], []

    def open_page(url: str, ready: bool = True, **options):
        context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("requestfailed", lambda request: is_here(request.url) or request.failure == "csp"
                or troubles.append(f"tried to fetch {request.url}"))  # fmt: skip
        page.on("response", lambda response: is_here(response.url) or troubles.append(f"fetched {response.url}"))
        page.goto(url)
        if ready:
            expect(page.locator("#or-status")).to_have_attribute("data-phase", re.compile("ready|writing"))
            expect(page.locator("#or-memory input[type=number]")).to_be_enabled()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def is_here(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:"))
