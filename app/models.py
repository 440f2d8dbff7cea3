"""At most one model is prepared at a time, in its own thread, and it goes on when the page that asked is closed."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from app.desk import DEFAULT_NAME, describe, display_name, explain

if TYPE_CHECKING:
    from engine import ModelInfo, Progress

EXPERT_CHOICES = [("int4, smallest", "int4"), ("int8", "int8"), ("bf16, as published", "bf16")]


def choices(backend: Any, current: str | None = None) -> list[tuple[str, str]]:
    """(label, name) of every model that can be loaded now; the default one is fetched when it is not there.

    current: the model in use, which may be the path of a store elsewhere.
    """
    stores = [(_label(backend, info), info.name) for info in backend.list_models()]
    if not any(name == "default" for _, name in stores):
        stores.insert(0, (f"{DEFAULT_NAME} (default, fetched when chosen)", "default"))
    if current is not None and all(name != current for _, name in stores):
        stores.append((display_name(current), current))
    return stores


def _label(backend: Any, info: ModelInfo) -> str:
    default = " (default)" if info.name == "default" else ""
    return f"{display_name(info.name)}{default} · {backend.format_size(info.resident_bytes + info.expert_bytes_total)}"


def about(backend: Any, name: str | None) -> str:
    """HTML: what the model `name` is made of, or nothing when it is not here yet."""
    info = next((info for info in backend.list_models() if info.name == name), None)
    if info is None:
        return ""
    size = backend.format_size
    return (
        f'<p class="or-aside">{escape(info.architecture)}: {info.layers} layers of {info.experts} experts, '
        f"{info.top_k} used for each token. Experts {size(info.expert_bytes_total)} as {info.expert_format}, "
        f"everything else {size(info.resident_bytes)}.</p>"
    )


def store_name(source: str, experts: str) -> str:
    """The directory name for a model from `source`, a hub id or a folder, with experts of that format."""
    source = source.strip().rstrip("/\\")
    if not Path(source).expanduser().exists():
        source = source.replace("/", "--")  # a hub id: owner--name
    last = PurePath(source.replace("\\", "/")).name
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', last).strip('-.') or 'model'}-{experts}"


@dataclass(frozen=True)
class State:
    """How far preparing is. phase: `idle`, `running`, `done`, `failed` or `cancelled`."""

    phase: str = "idle"
    text: str = ""
    fraction: float | None = None
    name: str = ""


class Preparing:
    """Prepares one model after another into the backend's models directory."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.state = State()
        self._cancel = threading.Event()
        self._started = (0.0, 0, "")  # when the present stage began, and what was done of it then

    @property
    def running(self) -> bool:
        return self.state.phase == "running"

    def start(self, source: str, experts: str) -> str:
        """Begin; returns a sentence when that is impossible, else an empty string."""
        if self.running:
            return "Another model is being prepared: wait for it or cancel it."
        if not source.strip():
            return "Give a hub id such as Qwen/Qwen3-30B-A3B, or the path of a model folder."
        name = store_name(source, experts)
        target = self._backend.MODELS_DIR / name
        self.state = State("running", f"Looking for {source.strip()}", None, name)
        self._cancel.clear()
        threading.Thread(target=self._run, args=(source.strip(), target, experts), name="outrider-prepare",
                         daemon=True).start()  # fmt: skip
        return ""

    def cancel(self) -> None:
        self._cancel.set()

    def _run(self, source: str, target: Any, experts: str) -> None:
        name = self.state.name
        try:
            self._backend.prepare(source, target, experts, self._report, self._cancel)
        except Exception as error:  # noqa: BLE001 - the page shows it
            if self._cancel.is_set():
                self.state = State("cancelled", "Cancelled. What was fetched is kept, so it can be taken up again.")
            else:
                self.state = State("failed", explain(error, self._backend.OutriderError), None, name)
            return
        self.state = State("done", f"{name} is ready: choose it above.", 1.0, name)

    def _report(self, progress: Progress) -> None:
        now = time.monotonic()
        began, before, stage = self._started
        if progress.stage != stage:
            began, before = now, progress.done
            self._started = (began, before, progress.stage)
        text, fraction = describe(progress)
        done, gone = progress.done - before, now - began
        if done > 0 and gone > 2:
            text += f", about {duration((progress.total - progress.done) * gone / done)} left"
        self.state = State("running", text, fraction, self.state.name)


def duration(seconds: float) -> str:
    """`seconds` in words, no finer than people care for."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def progress_html(state: State) -> str:
    if state.phase == "idle":
        return ""
    width = 100 * (state.fraction or 0)
    bar = f'<div class="or-track"><i style="width:{width:.1f}%"></i></div>' if state.phase == "running" else ""
    return f'<div class="or-job {state.phase}" role="status">{bar}<p>{escape(state.text)}</p></div>'
