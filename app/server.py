"""The page and its server stay on this computer: nothing is fetched from elsewhere, nothing is reported to anyone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from app.desk import Desk
from app.history import Archive
from app.models import Preparing
from app.panels import Meter
from app.share import GUEST, Access
from app.theme import theme
from app.ui import ASSETS, BRAND, lay_out
from app.wiring import Wiring

# The browser itself then refuses what a page, or an image in a reply, would fetch from elsewhere. Gradio's own
# components need inline scripts, inline styles and `new Function`.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEAD = '<meta name="viewport" content="width=device-width, initial-scale=1, viewport-fit=cover">'


class PrivacyHeaders:
    """ASGI middleware: adds the content policy to every response, and tells other sites nothing of this one."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        async def send_with_headers(message: dict) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"content-security-policy", _POLICY.encode()),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


@dataclass
class App:
    """The page and what is behind it, from `build_app`; `close` ends all of it."""

    blocks: gr.Blocks
    desk: Desk
    preparing: Preparing
    archive: Archive
    access: Access

    def launch(self, host: str = "127.0.0.1", port: int = 7860) -> str:
        """Start serving in the background; returns the address for a browser on this computer."""
        middleware = [Middleware(PrivacyHeaders)]
        if not self.access.remote:
            # A page elsewhere whose name resolves to this computer would otherwise pass for this one.
            names = ["127.0.0.1", "localhost", "[::1]", host]
            middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=names))
        self.blocks.queue(default_concurrency_limit=None, api_open=False)
        # Left alone, the queue looks for work a thousand times a second, which the engine would pay for.
        self.blocks._queue.sleep_when_free = 0.02
        self.blocks._queue.progress_update_sleep_when_free = 0.2
        _, url, _ = self.blocks.launch(
            server_name=host, server_port=port, auth=list(self.access.accounts) or None,
            auth_message=BRAND, share=False, quiet=True,
            prevent_thread_lock=True, inbrowser=False, show_error=True, footer_links=[], run_history=False,
            enable_monitoring=False, ssr_mode=False, pwa=False, mcp_server=False, num_workers=0, max_threads=16,
            max_file_size=0, theme=theme((ASSETS / "app.css").read_text(encoding="utf-8")), favicon_path=ASSETS / "icon.svg",
            head=_HEAD, state_session_capacity=500, app_kwargs={"middleware": middleware},
        )  # fmt: skip
        return url

    def close(self) -> None:
        self.preparing.cancel()
        self.desk.close()
        self.blocks.close(verbose=False)
        self.archive.close()


def build_app(backend: Any, *, data_dir: Path | None = None, access: Access = Access()) -> App:  # noqa: B008 - frozen
    """The app over `backend`, the engine's façade. Nothing is loaded and nothing listens yet.

    data_dir: where conversations are kept; None keeps them in memory, a history for each tab.
    """
    desk = Desk(backend, Meter())
    archive, preparing = Archive(data_dir, GUEST), Preparing(backend)
    with gr.Blocks(title="Outrider", analytics_enabled=False, fill_width=True) as blocks:
        page = lay_out(backend, desk, may_prepare=not access.remote)
        Wiring(backend, desk, archive, preparing, page).connect(blocks)
    return App(blocks, desk, preparing, archive, access)
