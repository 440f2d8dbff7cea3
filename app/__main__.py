"""`python -m app` shows the page first and loads the model behind it, so there is something to see at once."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import webbrowser
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from app import share
from app.history import default_data_dir

if TYPE_CHECKING:
    from engine import EngineConfig


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m app", description="Chat with a Mixture-of-Experts model in a browser.")
    p.add_argument("--model", default="default", help="a store under models/, a store's path, or `default`")
    p.add_argument("--expert-memory", default="auto", help="64MiB, 1.5GiB, 25%% (of the experts) or auto")
    p.add_argument("--mode", default="on-demand", help="on-demand, specter, or edge0 (with prerouter heads)")
    p.add_argument("--no-lora", action="store_true", help="edge0: leave the recovery LoRA off")
    p.add_argument("--depth", default="auto", help="specter: draft tokens a window, 0 to 32, or auto")
    p.add_argument("--draft-bits", type=int, default=4, help="specter: bits of the draft, 4, 3 or 2")
    p.add_argument("--context", type=int, default=4096, help="longest conversation and reply together, in tokens")
    p.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; needs a password if not this computer's own"
    )
    p.add_argument("--port", type=int, help="port to listen on (default: the first free one from 7860 on)")
    p.add_argument("--share", action="store_true", help="open a public link, behind a user name and a password")
    p.add_argument("--auth", action="append", default=[], metavar="USER:PASSWORD",
                   help="who may connect; can be repeated, and each user has a history of their own")  # fmt: skip
    p.add_argument("--data", type=Path, default=default_data_dir(), help="where conversations are kept (%(default)s)")
    p.add_argument("--no-browser", action="store_true", help="do not open a browser")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    try:
        access = share.decide(args.host, args.share, args.auth, share.terminal())
        port = share.free_port(args.host, args.port)
    except share.AccessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    print("Starting…", flush=True)
    import engine  # takes seconds, and the mistakes above should not have to wait for it
    from app.server import build_app

    try:
        config = engine_config(engine, args)
    except engine.OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    app = build_app(engine, data_dir=args.data, access=access)
    share.spare_proxy(os.environ)
    try:
        url = app.launch(args.host, port)
    except OSError as error:
        print(f"error: cannot listen on {args.host}:{port} ({error}); choose another with --port", file=sys.stderr)
        return 2
    app.desk.load(config)
    announce(url, args.host, access)
    if not args.no_browser:
        webbrowser.open(url)
    if args.share:
        share.open_link("127.0.0.1" if args.host == "0.0.0.0" else args.host, port, share.gradio_tunnel, say)
    wait_for_end()
    app.close()
    return 0


def engine_config(backend: ModuleType, args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError for a value that cannot be used."""
    mode = {mode.value: mode for mode in backend.Mode}.get(args.mode, args.mode)
    return backend.EngineConfig(model=args.model, expert_memory=args.expert_memory, context=args.context, mode=mode,
                                lora=not args.no_lora, depth=backend.parse_depth(args.depth),
                                draft_bits=args.draft_bits)  # fmt: skip


def announce(url: str, host: str, access: share.Access) -> None:
    say(f"Outrider is at {url}")
    if not share.is_loopback(host):
        say(f"Other computers reach it by this one's name or address, port {url.rstrip('/').rpartition(':')[2]}.")
    for user, password in access.accounts:
        say(f"User name: {user}" + (f"   Password: {password}" if access.made_up else ""))
    say("Press Ctrl+C to end.")


def say(text: str) -> None:
    print(text, flush=True)


def wait_for_end() -> None:
    ended = threading.Event()
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), lambda *_: ended.set())
    while not ended.wait(0.5):  # a wait without a limit cannot be interrupted on Windows
        pass
    print("\nEnding…", flush=True)


if __name__ == "__main__":
    sys.exit(main())
