"""One worker thread owns the engine: loading, settings and replies wait in one visible line, first come first served.

So there is never more than one generation, and no lock of the engine's is ever waited for.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from app.panels import Meter
    from engine import Engine, EngineConfig, EngineStats, GenerationConfig, Progress

DEFAULT_NAME = "SmolMoE"
OPENED = "<think>\n"
log = logging.getLogger("outrider")


@dataclass(frozen=True)
class Status:
    """What the engine is doing. phase: `empty`, `loading`, `ready` or `failed`; fraction: of a download, or None."""

    phase: str = "empty"
    model: str = ""
    detail: str = ""
    fraction: float | None = None


class Figures(NamedTuple):
    """What the panels show of the engine: its statistics, and the state of every expert."""

    stats: EngineStats
    residency: np.ndarray


class Ticket:
    """A place in the line. `done` is set when the work has ended, failed (`error`) or was withdrawn."""

    def __init__(self, work: Callable[[], None], on_error: Callable[[str], None] = lambda text: None) -> None:
        self._work, self._on_error = work, on_error
        self.started = False
        self.done = threading.Event()
        self.error = ""

    def run(self, expected: type[Exception]) -> None:
        self.started = True
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the worker outlives whatever a job does
            self.error = explain(error, expected)
            self._on_error(self.error)
        self.end()

    def end(self) -> None:
        self.done.set()


class Turn(Ticket):
    """One reply being made. `text` grows while the worker writes; `stop` ends it within a token.

    on_end: called once, before `done` is set, when the reply is as complete as it will be.
    """

    def __init__(self, desk: Desk, messages: list[dict], generation: GenerationConfig,
                 on_end: Callable[[Turn], None]) -> None:  # fmt: skip
        super().__init__(lambda: desk.generate(self))
        self.messages, self.generation, self._on_end = messages, generation, on_end
        self.stop = threading.Event()
        self.text = ""
        self.finish_reason: str | None = None
        self.stats: Any = None  # EngineStats when it ended

    def end(self) -> None:
        try:
            self._on_end(self)
        except Exception as error:  # noqa: BLE001 - as in run
            self.error = self.error or explain(error, ())
        self.done.set()


class Change(Ticket):
    """Settings asked for. When it ends, the pages learn whether they are in force or were refused."""

    def __init__(self, desk: Desk, changes: dict[str, Any]) -> None:
        super().__init__(lambda: desk.apply(changes))
        self.changes, self._desk = changes, desk

    def end(self) -> None:
        self._desk.settled(self)
        self.done.set()


class Desk:
    """The line, and the engine behind it.

    backend: the engine's façade. meter: told when a reply begins and of the tokens of every chunk.
    """

    def __init__(self, backend: ModuleType | Any, meter: Meter) -> None:
        self.backend = backend
        self.engine: Engine | None = None
        self.status = Status()
        self.version = 0  # grows with every change of model, settings or what was asked for: pages then ask again
        self.modes: dict[str, str | None] = {}  # of the loaded model: see Engine.modes
        self.turn: Turn | None = None  # the one being written
        self.meter = meter
        self._line: deque[Ticket] = deque()
        self._asked: list[Change] = []  # in the line or under way
        self._change = threading.Condition()
        self._remaking = threading.Lock()  # held while the engine changes what its figures are read from
        self._figures: Figures | None = None
        self._closed = False
        self._worker = threading.Thread(target=self._serve, name="outrider-desk", daemon=True)
        self._worker.start()

    def _serve(self) -> None:
        while True:
            with self._change:
                while not self._line and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                ticket = self._line.popleft()
            ticket.run(self.backend.OutriderError)

    def _enter(self, ticket: Ticket) -> Ticket:
        with self._change:
            self._line.append(ticket)
            self._change.notify()
        return ticket

    def position(self, ticket: Ticket) -> int:
        """0 once the ticket's work has begun or ended, else its place in the line, from 1."""
        with self._change:
            return self._line.index(ticket) + 1 if ticket in self._line else 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def asked(self) -> dict[str, Any]:
        """The settings that are neither in force nor refused yet, each as it was asked for last."""
        with self._change:
            return {name: value for change in self._asked for name, value in change.changes.items()}

    def figures(self) -> Figures | None:
        """The engine's figures; the last ones while it is being changed, None without a model. Never waits."""
        if self._remaking.acquire(blocking=False):
            try:
                engine = self.engine
                self._figures = engine and Figures(engine.stats(), engine.residency())
            finally:
                self._remaking.release()
        return self._figures

    # What people ask for -------------------------------------------------------------------------------------------

    def load(self, config: EngineConfig) -> Ticket:
        """Load the model of `config` in place of the present one, once it is this ticket's turn."""
        return self._enter(Ticket(lambda: self._load(config), lambda text: self._not_loaded(config, text)))

    def configure(self, **changes: Any) -> Ticket:
        """Change expert memory, mode, prefetch, LoRA or the draft without a reload: as soon as no reply is being written,
        and after the changes that were asked for before."""
        change = Change(self, changes)
        with self._change:
            self._asked.append(change)
            self._line.insert(sum(isinstance(ticket, Change) for ticket in self._line), change)
            self._change.notify()
        self.version += 1
        return change

    def reply(self, messages: list[dict], generation: GenerationConfig, on_end: Callable[[Turn], None]) -> Turn:
        turn = Turn(self, messages, generation, on_end)
        self._enter(turn)
        return turn

    def stop(self, turn: Turn) -> None:
        """End `turn`: within one token when it is being written, at once when it is still waiting."""
        turn.stop.set()
        with self._change:
            waiting = turn in self._line
            if waiting:
                self._line.remove(turn)
        if waiting:
            turn.finish_reason = "stopped"
            turn.end()

    def close(self) -> None:
        """Stop what is running and free the engine."""
        with self._change:
            self._closed = True
            if self.turn is not None:
                self.turn.stop.set()
            self._change.notify()
        if threading.current_thread() is not self._worker:
            self._worker.join(timeout=10)
        self._drop()

    # What the worker does ------------------------------------------------------------------------------------------

    def _load(self, config: EngineConfig) -> None:
        name = display_name(config.model)
        self._say(Status("loading", name, f"Loading {name}"))
        if config.model == "default":
            self.backend.fetch_default(lambda p: self._say(Status("loading", name, *describe(p))))
            self._say(Status("loading", name, f"Loading {name}"))
        self.backend.plan(config)  # finds a wrong name or a damaged store while the old model is still there
        self._drop()  # two models would not fit, so the old one goes first
        engine = self.backend.Engine(config)
        self.modes, self.engine = engine.modes(), engine
        self._say(Status("ready", name))

    def _not_loaded(self, config: EngineConfig, text: str) -> None:
        kept = self.engine is not None
        self._say(Status("ready", display_name(self.engine.config.model)) if kept
                  else Status("failed", display_name(config.model), text))  # fmt: skip

    def _drop(self) -> None:
        with self._remaking:
            engine, self.engine = self.engine, None
            if engine is not None:
                engine.close()

    def apply(self, changes: dict[str, Any]) -> None:
        engine = self._ready()
        with self._remaking:
            engine.configure(**changes)

    def settled(self, change: Change) -> None:
        with self._change:
            self._asked.remove(change)
        self.version += 1

    def generate(self, turn: Turn) -> None:
        """Write `turn`'s reply; it has everything that was said even when this raises."""
        engine, self.turn = self._ready(), turn
        self.meter.begin()
        try:
            if engine.opens_reasoning(turn.messages):
                turn.text = OPENED  # the template did it; kept with the reply, it reads the same ever after
            for chunk in engine.chat(turn.messages, turn.generation, turn.stop):
                turn.text += chunk.text
                turn.finish_reason = chunk.finish_reason
                self.meter.add(len(chunk.token_ids))
        finally:
            turn.stats = engine.stats()
            self.turn = None

    def _ready(self) -> Engine:
        if self.engine is None:
            reason = self.status.detail if self.status.phase == "failed" else "choose one under Model"
            raise self.backend.StoreError(f"No model is loaded: {reason}")
        return self.engine

    def _say(self, status: Status) -> None:
        self.status = status
        if status.fraction is None:
            self.version += 1


def describe(progress: Progress) -> tuple[str, float | None]:
    """A sentence and the fraction done of a long job's progress."""
    if not progress.total:
        return progress.stage, None
    fraction = min(progress.done / progress.total, 1.0)
    if progress.unit == "bytes":
        return f"{progress.stage}: {progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB", fraction
    return f"{progress.stage}: {progress.done:,} of {progress.total:,} {progress.unit}", fraction


def explain(error: Exception, expected: type[Exception] | tuple[()]) -> str:
    """A line for the person. What nobody foresaw is logged as well, by type and place: its message may quote a chat."""
    if isinstance(error, expected):
        return str(error)
    log.error("unexpected %s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
    return f"Something unforeseen went wrong ({type(error).__name__}: {error}). Details are in the terminal."


def display_name(model: str) -> str:
    """What people call the model that the engine knows as `model`: a name or the path of a store."""
    return DEFAULT_NAME if model == "default" else PurePath(model).name


def with_changes(config: EngineConfig, **changes: Any) -> EngineConfig:
    """`config` with the settings that are not None."""
    return replace(config, **{name: value for name, value in changes.items() if value is not None})
