"""Fixtures of the app's tests: a stand-in engine, the app over it, and a headless Chromium where there is one."""

from __future__ import annotations

import shutil
import sys
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
