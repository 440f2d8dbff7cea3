"""What happens when something is clicked: each handler changes the tab or the desk, then shows what is so now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app import export, modes, panels
from app.controls import MIB, Panel, generation_config, memory_range
from app.desk import Desk, with_changes
from app.history import Archive
from app.models import Preparing, about, choices, progress_html
from app.render import listing_html, note_html, notice_html
from app.session import Replies, ReplyError, Tab, shown, turn_of
from app.ui import Page

_DOWNLOAD = """(file) => {
  if (!file) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([file.text], {type: file.type}));
  link.download = file.name;
  link.click();
  URL.revokeObjectURL(link.href);
}"""
_REMEMBER = "(id) => { sessionStorage.setItem('outrider-conversation', id); }"
_REMEMBERED = "() => [sessionStorage.getItem('outrider-conversation') ?? '']"
_QUICK = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
_STREAM = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private",
           "trigger_mode": "multiple"}  # fmt: skip


@dataclass
class Wiring:
    """Connects `page` to what it works on."""

    backend: Any
    desk: Desk
    archive: Archive
    preparing: Preparing
    page: Page

    def __post_init__(self) -> None:
        self.replies = Replies(self.desk)

    def connect(self, blocks: gr.Blocks) -> None:
        p = self.page
        view = [p.chat, p.box, p.notice, p.listing, p.current]
        talk = [p.tab, p.system, *p.sampling]
        blocks.load(self.open, [p.current], [p.tab, p.system, *view], js=_REMEMBERED, **_QUICK)
        blocks.unload(self.close)
        p.current.change(None, [p.current], None, js=_REMEMBER, **_QUICK)
        p.header.refresh(self.refresh, [p.memory, p.panel], self._settings, **_QUICK)

        p.box.submit(self.send, [p.box, *talk], view, **_STREAM)
        p.chat.example_select(self.send_example, talk, view, **_STREAM)
        p.notice.again(self.again_last, talk, view, **_STREAM)
        p.chat.retry(self.again, talk, view, **_STREAM)
        p.chat.edit(self.edit, talk, view, **_STREAM)
        p.box.stop(self.stop, None, None, **_QUICK)

        p.new.click(self.new, [p.tab, p.system], view, **_QUICK)
        p.listing.pick(self.pick, [p.tab], [p.system, *view], **_QUICK)
        p.listing.remove(self.remove, [p.tab, p.system], view, **_QUICK)
        p.system.blur(self.set_system, [p.tab, p.system], None, **_QUICK)
        for button, kind in ((p.save_markdown, "md"), (p.save_json, "json")):
            button.click(self._exporter(kind), [p.tab], [p.exported, p.notice], **_QUICK).then(
                None, [p.exported], None, js=_DOWNLOAD)  # fmt: skip

        setting = [p.offload_notice]
        p.memory.release(self.set_memory, [p.memory, p.panel], setting, **_STREAM)
        p.memory.change(self.slide_memory, [p.memory, p.panel], setting, **_STREAM)  # the keyboard releases nothing
        p.modes.choose(self.choose, None, [p.modes, p.mode_notice], **_STREAM)
        p.model.input(lambda name: about(self.backend, name), [p.model], [p.about], **_QUICK)
        p.load.click(self.load, [p.model, p.context], [p.model_notice], **_STREAM)
        if p.prepare is not None:
            job = [p.job, p.prepare, p.cancel, p.model]
            p.prepare.click(self.prepare, [p.source, p.experts], job, **_STREAM)
            p.cancel.click(self.preparing.cancel, None, None, **_QUICK)
            blocks.load(self.follow_job, None, job, **_STREAM)

    # The page itself -----------------------------------------------------------------------------------------------

    async def open(self, current: str, request: gr.Request) -> tuple:
        """A new page: the conversation this browser tab had before it was reloaded, else an empty one."""
        await self.replies.settled(current)
        history = self.archive.of(request.username)
        tab = Tab(history, owns_history=self.archive.is_passing(request.username))
        if current:
            tab.open(current)
        chat, _, *others = self._view(tab, notice=history.notice)
        box = gr.update(interactive=True, placeholder="Ask something", autofocus=True)
        return (tab, tab.conversation.system, chat, box, *others)

    def close(self, request: gr.Request) -> None:
        self.replies.stop(request.session_hash)

    @property
    def _settings(self) -> list:
        p = self.page
        return [p.memory, p.modes, p.quality, p.plan, p.why, p.model, p.context, p.about]

    def refresh(self, shown_memory: float | None, panel: Panel) -> tuple:
        """What is in force, or asked for, for the controls of one page."""
        engine = self.desk.engine
        models = gr.update(choices=choices(self.backend))
        if engine is None:
            panel.model = panel.memory = None
            off = gr.update(interactive=False)
            return off, modes.chooser(None), modes.quality(None), panels.plan_bar(None), "", models, gr.skip(), ""
        plan, config = engine.plan, engine.config
        least, now, most = memory_range(plan)
        value = panel.to_tell(now, shown_memory, asked="expert_memory" in self.desk.asked)
        slider = gr.update(minimum=least, maximum=max(most, least + 1), interactive=most > least, **value)
        picker = (gr.skip(), gr.skip(), gr.skip())
        if panel.model != (config.model, config.context):
            panel.model = (config.model, config.context)
            models = gr.update(choices=choices(self.backend, config.model), value=config.model)
            picker = (models, config.context, about(self.backend, config.model))
        return (
            slider,
            modes.chooser(self._choices()),
            modes.quality(self._stats()),
            panels.plan_bar(plan),
            panels.where_experts_are(plan),
            *picker,
        )

    def _view(self, tab: Tab, waiting: str = "", box: Any = None, notice: Any = None, listing: bool = True) -> tuple:
        """(chat, box, notice, listing, current) for what `tab` shows; what is None stays as it is on the page."""
        return (
            shown(tab, self.backend.split_reasoning, waiting),
            self._box(tab, box),
            gr.skip() if notice is None else notice_html(notice),
            self._listing(tab) if listing else gr.skip(),
            tab.conversation.id,
        )

    @staticmethod
    def _listing(tab: Tab) -> str:
        return listing_html(tab.history.entries(), tab.conversation.id)

    @staticmethod
    def _box(tab: Tab, text: str | None) -> Any:
        writing = tab.writing is not None
        update = {"submit_btn": not writing, "stop_btn": writing}
        return gr.update(**update) if text is None else gr.update(value=text, **update)

    # Talking -------------------------------------------------------------------------------------------------------

    async def send(self, request: gr.Request, text: str, tab: Tab | None, system: str, *sampling: Any) -> AsyncIterator:
        if not (text and text.strip()):
            yield self._unchanged()
            return
        refusal, generation = self._prepare_turn(tab, sampling)
        if refusal:
            yield self._unchanged(refusal)
            return
        tab.conversation.system = system
        tab.say(text.strip())
        async for view in self._write(tab, generation, request, box=""):
            yield view

    async def send_example(self, request: gr.Request, chosen: gr.SelectData, *talk: Any) -> AsyncIterator:
        async for view in self.send(request, chosen.value["text"], *talk):
            yield view

    async def again(self, request: gr.Request, chosen: gr.RetryData, *talk: Any) -> AsyncIterator:
        async for view in self._retake(request, None, chosen.index, *talk):
            yield view

    async def again_last(self, request: gr.Request, *talk: Any) -> AsyncIterator:
        async for view in self._retake(request, None, None, *talk):
            yield view

    async def edit(self, request: gr.Request, changed: gr.EditData, *talk: Any) -> AsyncIterator:
        async for view in self._retake(request, changed.value, changed.index, *talk):
            yield view

    async def _retake(self, request: gr.Request, text: str | None, index: Any, tab: Tab | None, system: str,
                      *sampling: Any) -> AsyncIterator:  # fmt: skip
        """Say the user's turn at or before the chatbot's message `index` (None: the last one) again, as `text` if that
        is given."""
        refusal, generation = self._prepare_turn(tab, sampling)
        if refusal:
            yield self._view(tab, notice=refusal) if tab else self._unchanged(refusal)
            return
        last = len(tab.conversation.messages) - 1
        before = tab.take_back(last if index is None else turn_of(tab, self.backend.split_reasoning, index))
        tab.conversation.system = system
        tab.say((text or before).strip())
        async for view in self._write(tab, generation, request):
            yield view

    def _prepare_turn(self, tab: Tab | None, sampling: tuple) -> tuple[str, Any]:
        """(why a reply cannot be asked for now, the generation settings)."""
        if tab is None:
            return "The page is still opening: try again in a moment.", None
        if tab.writing is not None:
            return f"A reply is being written in “{tab.writing[1].title}”: wait for it or stop it.", None
        try:
            return "", generation_config(self.backend, *sampling)
        except self.backend.OutriderError as error:
            return str(error), None

    async def _write(self, tab: Tab, generation: Any, request: gr.Request, box: str | None = None) -> AsyncIterator:
        conversation, notice, saved = tab.conversation, "", state_of(tab)
        first = True
        try:
            async for waiting in self.replies.write(tab, request.session_hash, generation):
                if tab.conversation is conversation:
                    yield self._view(tab, waiting, box if first else None, "" if first else None, listing=first)
                elif first or saved != state_of(tab):
                    yield (gr.skip(), self._box(tab, None), gr.skip(), self._listing(tab), gr.skip())
                first, saved = False, state_of(tab)
        except ReplyError as error:
            notice = str(error)
        if tab.conversation is conversation:
            yield (*self._view(tab)[:2], notice_html(notice, again=True), self._listing(tab), tab.conversation.id)
        else:
            yield (gr.skip(), self._box(tab, None), notice_html(notice), self._listing(tab), gr.skip())

    def stop(self, request: gr.Request) -> None:
        self.replies.stop(request.session_hash)

    @staticmethod
    def _unchanged(notice: str = "") -> tuple:
        return gr.skip(), gr.skip(), notice_html(notice), gr.skip(), gr.skip()

    # Conversations -------------------------------------------------------------------------------------------------

    def new(self, tab: Tab, system: str) -> tuple:
        tab.new(system)
        return self._view(tab, notice="")

    def pick(self, tab: Tab, chosen: gr.EventData) -> tuple:
        notice = "" if tab.open(chosen.id) else "This conversation was deleted in another tab."
        return (tab.conversation.system, *self._view(tab, notice=notice))

    def remove(self, tab: Tab, system: str, chosen: gr.EventData) -> tuple:
        if tab.writing is not None and tab.writing[1].id == chosen.id:
            return self._unchanged("Its reply is still being written: stop it first.")
        tab.history.delete(chosen.id)
        if tab.conversation.id == chosen.id:
            tab.new(system)
        return self._view(tab, notice="")

    def set_system(self, tab: Tab, system: str) -> None:
        if tab is not None and tab.conversation.system != system:
            tab.conversation.system = system
            if tab.conversation.messages:
                tab.history.save(tab.conversation)

    def _exporter(self, kind: str) -> Any:
        write, mime = (export.to_markdown, "text/markdown") if kind == "md" else (export.to_json, "application/json")

        def exported(tab: Tab) -> tuple:
            if not tab.conversation.messages:
                return None, notice_html("There is nothing to export yet.")
            conversation = tab.conversation
            return {"name": export.file_name(conversation, kind), "text": write(conversation), "type": mime}, ""

        return exported

    # The engine ----------------------------------------------------------------------------------------------------

    async def slide_memory(self, mebibytes: float | None, panel: Panel) -> AsyncIterator:
        """Set the budget once the slider has been at rest for a while."""
        move = panel.move()
        await asyncio.sleep(1)
        yield gr.skip()  # an event that yields nothing counts as unfinished, and keeps the page's clock running
        if move == panel.moves:
            async for note in self.set_memory(mebibytes, panel):
                yield note

    async def set_memory(self, mebibytes: float | None, panel: Panel) -> AsyncIterator:
        """Set the budget; nothing happens where the slider only shows what is in force."""
        yield gr.skip()
        engine = self.desk.engine
        if engine is None or mebibytes is None:
            return
        least, now, most = memory_range(engine.plan)
        if mebibytes != now:
            panel.memory = None  # whatever comes of it, the page is told
            # The slider moves in whole MiB; its ends are the plan's exact limits.
            limits = {least: engine.plan.min_expert_bytes, most: engine.plan.max_expert_bytes}
            async for note in self._configure(expert_memory=limits.get(int(mebibytes), int(mebibytes) * MIB)):
                yield note

    async def choose(self, chosen: gr.EventData) -> AsyncIterator:
        """Change what a button of the mode switch stands for: it shows what was asked for until that is in force."""
        async for note in self._configure(**modes.setting(self.backend, chosen.setting, chosen.value)):
            yield modes.chooser(self._choices()), note

    def _choices(self) -> modes.Choices | None:
        engine, asked, stats = self.desk.engine, self.desk.asked, self._stats()
        if engine is None or stats is None:
            return None
        config = with_changes(engine.config, **{k: v for k, v in asked.items() if k != "expert_memory"})
        without = not asked and modes.MODES[stats.mode].lora and engine.config.lora and not stats.lora
        return modes.Choices(self.desk.modes, config, engine.supports_gate, not without, engine.drafts())

    def _stats(self) -> Any:
        figures = self.desk.figures()
        return figures and figures.stats

    async def _configure(self, **changes: Any) -> AsyncIterator:
        ticket = self.desk.configure(**changes)
        yield note_html("In force after the present reply." if self.desk.turn is not None else "")
        while not ticket.done.is_set():
            await asyncio.sleep(0.05)
        yield note_html(ticket.error, bad=True)

    async def load(self, model: str, context: float) -> AsyncIterator:
        if not model:
            yield note_html("Choose a model first.", bad=True)
            return
        engine = self.desk.engine
        base = engine.config if engine is not None else self.backend.EngineConfig()
        # Another model may lack what the present mode needs; the mode that an engine starts in needs nothing.
        mode = base.mode if model == base.model else self.backend.EngineConfig().mode
        try:
            config = with_changes(base, model=model, context=int(context or 0), expert_memory="auto", prefetch="auto",
                                  mode=mode)  # fmt: skip
        except self.backend.OutriderError as error:
            yield note_html(str(error), bad=True)
            return
        ticket = self.desk.load(config)
        while not ticket.done.is_set():
            yield note_html("Waiting for the present reply." if not ticket.started else self.desk.status.detail)
            await asyncio.sleep(0.3)
        yield note_html(ticket.error, bad=True)

    async def prepare(self, source: str, experts: str) -> AsyncIterator:
        refusal = self.preparing.start(source or "", experts)
        if refusal:
            yield note_html(refusal, bad=True), gr.skip(), gr.skip(), gr.skip()
            return
        async for view in self.follow_job():
            yield view

    async def follow_job(self) -> AsyncIterator:
        """Show how far preparing is until it ends; a page that is opened meanwhile joins in."""
        began = time.monotonic()
        while self.preparing.running:
            yield progress_html(self.preparing.state), gr.update(interactive=False), gr.update(visible=True), gr.skip()
            await asyncio.sleep(0.5 if time.monotonic() - began < 600 else 2)
        yield (progress_html(self.preparing.state), gr.update(interactive=True), gr.update(visible=False),
               gr.update(choices=choices(self.backend)))  # fmt: skip


def state_of(tab: Tab) -> tuple[str, int]:
    """Changes when the tab shows another conversation, or its own was saved."""
    return tab.conversation.id, tab.conversation.revision
