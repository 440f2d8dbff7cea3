"""The layout, and nothing else: conversations on the left, the chat in the middle, the engine on the right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app.controls import Panel
from app.desk import Desk
from app.models import EXPERT_CHOICES
from app.panels import DASH, live

ASSETS = Path(__file__).resolve().parent.parent / "assets"
EXAMPLES = [
    "What is a Mixture-of-Experts model?",
    "Write a short poem about a horse that rides ahead.",
    "Explain why the sky is blue to a ten-year-old.",
    "Give me three ideas for a rainy Sunday.",
]
_WELCOME = """<div class="or-welcome"><h2>What would you like to talk about?</h2>
<p>The model answers on this computer. Its experts are read from the disk as they are needed; the panel shows how.</p>
</div>"""
_MENU = '<svg viewBox="0 0 20 20"><path d="M3 5.5h14M3 10h14M3 14.5h9"/></svg>'
_GAUGE = '<svg viewBox="0 0 20 20"><path d="M3 15a7.5 7.5 0 1 1 14 0M10 12l3.5-4"/></svg>'
_MOON = '<svg viewBox="0 0 20 20"><path d="M16 12.2A6.8 6.8 0 1 1 8.2 4a5.4 5.4 0 0 0 7.8 8.2Z"/></svg>'
BRAND = f'<strong class="or-brand">{(ASSETS / "icon.svg").read_text(encoding="utf-8")}<span>Outrider</span></strong>'
_HEADER = f"""<div class="or-head">
<button type="button" data-side="left" aria-label="Conversations" title="Conversations">{_MENU}</button>
{BRAND}
<div id="or-status" data-phase="empty" role="status"><i></i><b></b><span>Connecting</span></div>
<button type="button" aria-label="Light or dark" title="Light or dark">{_MOON}</button>
<button type="button" data-side="right" aria-label="Engine panel" title="Engine panel">{_GAUGE}</button>
</div><div id="or-progress"><i></i></div><p id="or-failure" role="alert" hidden></p>"""


def _figure(name: str, label: str, hint: str, label_part: str = "") -> str:
    part = f' data-part="{label_part}"' if label_part else ""
    return f'<div title="{hint}"><dt{part}>{label}</dt><dd data-part="{name}">{DASH}</dd></div>'


def _legend(name: str, label: str) -> str:
    return (f'<span><i class="or-dot {name}"></i><em data-part="name-{name}">{label}</em>'
            f'<b data-part="count-{name}">0</b></span>')  # fmt: skip


def _bars(name: str, label: str) -> str:
    return (f'<figure data-bars="{name}" class="empty"><figcaption>{label}</figcaption>'
            f'<svg preserveAspectRatio="none" role="img"><path/></svg>'
            f'<small><span data-part="{name}-first"></span><span data-part="{name}-last"></span></small></figure>')  # fmt: skip


def _time(name: str, label: str) -> str:
    return f'<span><i class="or-dot {name}"></i>{label}<b data-part="{name}_share">{DASH}</b></span>'


_LIVE = f"""<section class="or-live">
<div class="or-rate"><div title="Tokens after the first, by the time since the first; and the time of one (TPOT)">
<b data-part="tok_s">{DASH}</b><span>tok/s</span><span><i data-part="tpot">{DASH}</i> a token</span></div>
<div data-part="chart" class="or-chart empty"><svg viewBox="0 0 300 60" preserveAspectRatio="none" aria-hidden="true">
<path data-part="area" class="area"/><path data-part="line" class="line"/></svg>
<small><span>lowest <b data-part="chart-low">{DASH}</b></span><span>highest <b data-part="chart-high">{DASH}</b></span>
</small></div></div>
<dl>
{_figure("peak", "Peak active memory", "The most that weights, experts, KV cache and scratch have been together")}
{_figure("rss", "Process (RSS)", "All memory of the program, interpreter and libraries included")}
{_figure("memory", "RAM in use", "The model's own memory now", "memory_kind")}
{_figure("hit_rate", "Cache hit rate", "Experts that were in memory when they were asked for")}
{_figure("ttft", "First token", "From sending the message to its first token")}
{_figure("read_per_token", "Read per token", "Bytes read from the disk for each token of the reply")}
{_figure("hidden_io", "Hidden I/O", "The share of the reading time during which nothing waited for it")}
{_figure("late", "Late reads", "Experts that were foreseen, but still on their way when they were asked for")}
{_figure("agreement", "Forecast agreement", "Of the experts that the heads pick, how many the model's own gate would have")}
{_figure("prefill", "Prompt read at", "Tokens of the prompt that had not been read before, by the time it took")}
</dl></section>"""
_DRAFT = f"""<section class="or-live or-draft or-card" hidden><h4>Draft</h4>
<p data-part="parked" hidden>Drafting ahead does not pay here, so its memory went to the experts.</p>
<dl>
{_figure("draft_depth", "Draft depth now", "Tokens that are drafted before the model checks them")}
{_figure("accepted", "Accepted, on average", "Of the drafted tokens of a window, how many the model agreed with")}
{_figure("recall", "Forecast recall", "Of the experts that checking used, how many the draft had named before")}
{_figure("link", "Experts come over", "SSD: read from the disk; PCIe: copied from the host's memory to the GPU")}
</dl>
<div class="or-pair">{_bars("accepted", "Accepted per window")}{_bars("positions", "Accepted by position")}</div>
<div class="or-bar" role="img" aria-label="Where the time goes"><i class="or-seg draft"></i><i class="or-seg verify"></i>
<i class="or-seg stall"></i></div>
<div class="or-legend">{_time("draft", "drafting")}{_time("verify", "checking")}{_time("stall", "waiting")}</div></section>"""
_MAP = f"""<section class="or-map"><h4>Experts <small>a row a layer, a column an expert</small></h4>
<div><canvas data-part="map" role="img" width="0" height="0"></canvas></div>
<div class="or-legend">{_legend("resident", "in memory")}{_legend("hit", "just used")}
{_legend("flying", "on its way")}{_legend("missed", "missed")}{_legend("absent", "on the disk")}</div>
<p data-part="asked">{DASH}</p></section>"""


@dataclass
class Page:
    """The components that handlers read and write."""

    tab: gr.State
    panel: gr.State
    current: gr.Textbox
    header: gr.HTML
    listing: gr.HTML
    new: gr.Button
    save_markdown: gr.Button
    save_json: gr.Button
    exported: gr.JSON
    chat: gr.Chatbot
    notice: gr.HTML
    box: gr.Textbox
    quality: gr.HTML
    modes: gr.HTML
    mode_notice: gr.HTML
    memory: gr.Slider
    plan: gr.HTML
    why: gr.HTML
    offload_notice: gr.HTML
    model: gr.Dropdown
    about: gr.HTML
    context: gr.Number
    load: gr.Button
    model_notice: gr.HTML
    source: gr.Textbox | None
    experts: gr.Radio | None
    prepare: gr.Button | None
    cancel: gr.Button | None
    job: gr.HTML | None
    system: gr.Textbox
    sampling: list[Any]


def lay_out(backend: Any, desk: Desk, may_prepare: bool) -> Page:
    """Draw the page inside the Blocks that is open. may_prepare: whether new models can be made from here."""
    parts: dict[str, Any] = {}
    parts["tab"] = gr.State(None, delete_callback=lambda tab: tab and tab.close())
    parts["panel"] = gr.State(Panel())
    parts["current"] = gr.Textbox(visible="hidden", elem_id="or-current")
    parts["exported"] = gr.JSON(visible="hidden", elem_id="or-exported")
    parts["header"] = _header(desk)
    with gr.Row(elem_id="or-shell"):
        with gr.Column(elem_id="or-left", min_width=0):
            _conversations(parts)
        with gr.Column(elem_id="or-centre", min_width=0):
            _chat(parts)
        with gr.Column(elem_id="or-right", min_width=0), gr.Tabs():
            with gr.Tab("Engine"):
                _offload(parts)
            with gr.Tab("Model"):
                _models(parts, backend, may_prepare)
            with gr.Tab("Reply"):
                _reply(parts, backend)
    return Page(**parts)


def _header(desk: Desk) -> gr.HTML:
    async def figures(_arguments: list) -> dict:
        return live(desk)

    return gr.HTML(_HEADER, elem_id="or-header", apply_default_css=False, js_on_load=_script("header"),
                   server_functions=[figures])  # fmt: skip


def _script(name: str) -> str:
    return (ASSETS / f"{name}.js").read_text(encoding="utf-8")


def _conversations(parts: dict) -> None:
    parts["new"] = gr.Button("New chat", elem_id="or-new", size="md")
    parts["listing"] = gr.HTML("", elem_id="or-list", apply_default_css=False, js_on_load=_script("list"))
    with gr.Row(elem_id="or-export"):
        gr.HTML("<span>Export</span>", min_width=0)
        parts["save_markdown"] = gr.Button("Markdown", size="sm", min_width=0)
        parts["save_json"] = gr.Button("JSON", size="sm", min_width=0)


def _chat(parts: dict) -> None:
    parts["chat"] = gr.Chatbot(
        elem_id="or-chat", show_label=False, height=None, editable="user", buttons=["copy"], placeholder=_WELCOME,
        examples=[{"text": text} for text in EXAMPLES], group_consecutive_messages=True, layout="bubble",
    )  # fmt: skip
    parts["notice"] = gr.HTML("", elem_id="or-notice", apply_default_css=False, js_on_load=_script("notice"))
    parts["box"] = gr.Textbox(
        "", elem_id="or-box", show_label=False, container=False, placeholder="Opening…", lines=1, max_lines=10,
        submit_btn=True, stop_btn=False, interactive=False,
        html_attributes=gr.InputHTMLAttributes(enterkeyhint="send", autocomplete="off"),
    )  # fmt: skip


def _offload(parts: dict) -> None:
    gr.HTML(_LIVE, elem_id="or-live", apply_default_css=False, js_on_load=_script("live"))
    gr.HTML(_DRAFT, elem_id="or-draft", apply_default_css=False, js_on_load=_script("draft"))
    with gr.Column(elem_classes="or-card"):
        parts["modes"] = gr.HTML("", elem_id="or-modes", apply_default_css=False, js_on_load=_script("modes"))
        parts["mode_notice"] = gr.HTML("", elem_id="or-mode-notice", elem_classes="or-note")
        parts["quality"] = gr.HTML("", elem_id="or-quality", apply_default_css=False)
    with gr.Column(elem_classes="or-card"):
        parts["memory"] = gr.Slider(0, 1, 0, step=1, label="Memory for experts (MiB)", interactive=False, buttons=[],
                                    elem_id="or-memory")  # fmt: skip
        parts["offload_notice"] = gr.HTML("", elem_classes="or-note")
        parts["plan"] = gr.HTML("", elem_id="or-plan", apply_default_css=False)
    with gr.Column(elem_classes="or-card"):
        gr.HTML(_MAP, elem_id="or-map", apply_default_css=False, js_on_load=_script("map"))
    with gr.Column(elem_classes="or-card"):
        parts["why"] = gr.HTML("", elem_id="or-why", apply_default_css=False)


def _models(parts: dict, backend: Any, may_prepare: bool) -> None:
    parts["model"] = gr.Dropdown([], label="Model", elem_id="or-model", filterable=False)
    parts["about"] = gr.HTML("", elem_classes="or-aside")
    parts["context"] = gr.Number(backend.EngineConfig().context, label="Context, in tokens", precision=0,
                                 info="The longest conversation and reply together, kept free as KV cache")  # fmt: skip
    parts["load"] = gr.Button("Load", variant="primary", elem_id="or-load")
    parts["model_notice"] = gr.HTML("", elem_classes="or-note", elem_id="or-model-notice")
    parts.update(dict.fromkeys(("source", "experts", "prepare", "cancel", "job")))
    if not may_prepare:
        gr.HTML('<p class="or-aside">New models can be prepared only when the app runs without --share and on this '
                "computer alone.</p>")  # fmt: skip
        return
    with gr.Column(elem_classes="or-card"):
        gr.HTML("<h4>Prepare a new model</h4>")
        parts["source"] = gr.Textbox("", label="Hub id or folder", placeholder="owner/name", elem_id="or-source")
        parts["experts"] = gr.Radio(EXPERT_CHOICES, value="int4", label="Precision of the experts")
        with gr.Row():
            parts["prepare"] = gr.Button("Prepare", min_width=0, elem_id="or-prepare")
            parts["cancel"] = gr.Button("Cancel", min_width=0, visible=False, elem_id="or-cancel")
        parts["job"] = gr.HTML("", elem_id="or-job")


def _reply(parts: dict, backend: Any) -> None:
    normal = backend.GenerationConfig()
    parts["system"] = gr.Textbox("", label="System prompt", lines=3, max_lines=10, elem_id="or-system",
                                 placeholder="What the model should know before you begin")  # fmt: skip
    parts["sampling"] = [
        gr.Slider(0, 2, normal.temperature, step=0.05, label="Temperature", info="0 always takes the likeliest token"),
        gr.Slider(0, 200, normal.top_k, step=1, label="Top k", info="0 is off"),
        gr.Slider(0.05, 1, normal.top_p, step=0.01, label="Top p", info="1 is off"),
        gr.Slider(0, 1, normal.min_p, step=0.01, label="Min p", info="0 is off"),
        gr.Slider(0.5, 2, normal.repetition_penalty, step=0.01, label="Repetition penalty", info="1 is off"),
        gr.Number(normal.max_tokens, label="Most tokens a reply", precision=0, elem_id="or-max-tokens"),
        gr.Textbox("", label="Seed", placeholder="random", info="The same seed gives the same reply"),
        gr.Textbox("", label="Stop strings, one a line", lines=2, max_lines=6),
    ]
