"""What the browser tests share: an app that is served while it is needed, and what a person does on its page."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect

from app.server import App, build_app
from app.share import Access

expect.set_options(timeout=30_000)  # a busy machine is slow, not wrong


@contextmanager
def serving(backend, data_dir: Path | None = None, access: Access = Access()) -> Iterator[tuple[App, str]]:  # noqa: B008
    app = build_app(backend, data_dir=data_dir, access=access)
    try:
        url = app.launch(port=spare_port())
        app.desk.load(backend.EngineConfig())
        yield app, url
    finally:
        app.close()


def spare_port() -> int:
    """A port that the system hands out: test runs side by side would otherwise find the same first free one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def say(page: Page, text: str) -> None:
    page.fill("#or-box textarea", text)
    page.press("#or-box textarea", "Enter")


def said(page: Page, text: str) -> None:
    """Say `text` and wait for the whole reply, which ends with its line of figures."""
    lines = page.locator("#or-chat .thought-group", has_text="tokens ·")
    before = lines.count()
    say(page, text)
    expect(lines).to_have_count(before + 1)
    wait_done(page)


def reply(page: Page):
    return page.locator("#or-chat [data-testid=bot]")


def choice(page: Page, name: str):
    return page.locator("#or-modes").get_by_role("radio", name=name)


def stop_button(page: Page):
    return page.locator("#or-box .stop-button")


def wait_done(page: Page) -> None:
    expect(page.locator("#or-box .submit-button")).to_be_visible()


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
