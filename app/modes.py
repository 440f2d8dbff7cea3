"""Each mode is described here once, and what can be chosen in it follows from that: no two controls contradict each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import EngineConfig, EngineStats


@dataclass(frozen=True)
class Described:
    """A mode in plain words. icon: an SVG path in a 20 x 20 box.

    ahead: who looks ahead, where the mode decides that; None where a person does.
    lora: whether the recovery LoRA belongs to it; draft: whether a draft does.
    """

    title: str
    line: str
    icon: str
    ahead: str | None = None
    lora: bool = False
    draft: bool = False


MODES = {
    "on-demand": Described(
        "On demand",
        "The model's own router picks the experts; those not in memory are read when they are needed.",
        "M10 3v9M6.5 8.8 10 12.3l3.5-3.5M3.5 13v2.5a1.5 1.5 0 0 0 1.5 1.5h10a1.5 1.5 0 0 0 1.5-1.5V13",
    ),
    "edge0": Described(
        "Edge0",
        "Small added heads pick the experts one token early, so reading starts in good time. The words differ a little.",
        "M3.5 4.5 9 10l-5.5 5.5M10.5 4.5 16 10l-5.5 5.5",
        ahead="The prerouter heads",
        lora=True,
    ),
    "specter": Described(
        "Specter",
        "A coarser copy of the experts drafts some tokens, which shows the experts they need; the model checks every one.",
        "M4.5 16.5V9a5.5 5.5 0 0 1 11 0v7.5l-1.85-1.4-1.8 1.4L10 15.1l-1.85 1.4-1.8-1.4zM8 8.6v.9M12 8.6v.9",
        ahead="The draft",
        draft=True,
    ),
}
PREFETCH = {"auto": "Whatever is faster", "gate": "The next layer's gate", "none": "Nobody"}
DEPTHS = (2, 4, 8, 16)  # to choose from, beside the governor's own choice
DRAFT_BITS = (4, 3, 2)
_FORMATS = {"bf16": "at full precision", "int8": "rounded to 8 bits", "int4": "rounded to 4 bits"}


@dataclass(frozen=True)
class Choices:
    """What is chosen, and what can be.

    modes: mode -> None where the loaded model has it, else a sentence that says why not. config: the settings as they are
    wanted. gate: whether the model's gates can be asked early. has_lora: whether there may be a recovery LoRA. drafts: bits of
    the drafts that were made of the model.
    """

    modes: dict[str, str | None]
    config: EngineConfig
    gate: bool = True
    has_lora: bool = True
    drafts: tuple[int, ...] = DRAFT_BITS


def chooser(choices: Choices | None) -> str:
    """HTML of the mode switch and of what can be chosen in the present mode; nothing without a model.

    Its buttons carry `data-set` (the setting) and `data-value`; the page's script turns a click into an event.
    """
    if choices is None:
        return ""
    mode = MODES[choices.config.mode.value]
    cards = "".join(_card(name, choices) for name in choices.modes)
    return (f'<h4 id="or-mode-name">Mode</h4><div class="or-cards" role="radiogroup" aria-labelledby="or-mode-name">'
            f"{cards}</div>{_ahead(mode, choices)}{_lora(choices) if mode.lora else ''}"
            f"{_draft(choices) if mode.draft else ''}")  # fmt: skip


def _card(name: str, choices: Choices) -> str:
    mode, reason = MODES[name], choices.modes[name]
    inside = (f'<svg viewBox="0 0 20 20" aria-hidden="true"><path d="{mode.icon}"/></svg>'
              f'<span id="or-mode-{name}"><b>{mode.title}</b><small>{mode.line}</small>'
              f"{_reason(reason)}</span>")  # fmt: skip
    about = f' aria-label="{mode.title}" aria-describedby="or-mode-{name}"'
    return _radio("mode", name, inside, name == choices.config.mode.value, reason is None, about)


def _ahead(mode: Described, choices: Choices) -> str:
    if mode.ahead is not None:
        return _option("Who looks ahead", "Set by the mode", f'<em class="or-fixed">{mode.ahead}</em>')
    able = {"auto": True, "gate": choices.gate, "none": True}
    radios = "".join(_radio("prefetch", name, title, name == choices.config.prefetch, able[name])
                     for name, title in PREFETCH.items())  # fmt: skip
    hint = ("The words are the same either way; looking ahead hides reading behind computing" if choices.gate
            else "This model has no gate that can be asked early")  # fmt: skip
    return _option("Who looks ahead", hint, _group("Who looks ahead", radios))


def _lora(choices: Choices) -> str:
    hint = ("A small trained correction for what picking early costs in quality"
            if choices.has_lora else "This model's heads came without one")  # fmt: skip
    on, disabled = choices.config.lora and choices.has_lora, "" if choices.has_lora else " disabled"
    switch = (f'<button type="button" class="or-switch" role="switch" aria-label="Recovery LoRA" aria-checked="{_word(on)}" '
              f'data-set="lora" data-value="{"off" if on else "on"}"{disabled}><i></i></button>')  # fmt: skip
    return _option("Recovery LoRA", hint, switch)


def _draft(choices: Choices) -> str:
    config, made = choices.config, [str(bits) for bits in sorted(choices.drafts)]
    depths = ["auto", *sorted({*DEPTHS, config.depth} - {"auto"})]
    depth = "".join(_radio("depth", str(value), str(value).capitalize(), value == config.depth, True,
                           ' aria-label="Auto"' if value == "auto" else f' aria-label="{value} tokens"')
                    for value in depths)  # fmt: skip
    bits = "".join(_radio("draft_bits", str(value), str(value), value == config.draft_bits, value in choices.drafts,
                          f' aria-label="{value} bits"')
                   for value in DRAFT_BITS)  # fmt: skip
    hint = ("Fewer leave the experts more memory, and guess worse" if len(made) == len(DRAFT_BITS)
            else f"Of this model there is a draft of {' and '.join(made) or 'no'} bits")  # fmt: skip
    return (_option("Draft depth", "Tokens drafted at a time; Auto finds what pays",
                    _group("Draft depth", depth))
            + _option("Draft bits", hint, _group("Draft bits", bits)))  # fmt: skip


def _group(name: str, radios: str) -> str:
    return f'<span class="or-choice" role="radiogroup" aria-label="{name}">{radios}</span>'


def _option(name: str, hint: str, control: str) -> str:
    return f'<div class="or-option"><p><b>{name}</b><small>{hint}</small></p>{control}</div>'


def _radio(setting: str, value: str, inside: str, checked: bool, able: bool, about: str = "") -> str:
    return (f'<button type="button" role="radio" data-set="{setting}" data-value="{value}" aria-checked="{_word(checked)}" '
            f'tabindex="{0 if checked else -1}"{"" if able else " disabled"}{about}>{inside}</button>')  # fmt: skip


def _reason(text: str | None) -> str:
    """A reason for people; what stands between backticks is a command."""
    if text is None:
        return ""
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
    return f'<small class="or-reason">{marked}</small>'


def _word(value: bool) -> str:
    return "true" if value else "false"


def setting(backend: Any, name: str, value: str) -> dict[str, Any]:
    """The change that a button of the chooser asks for, for `Engine.configure`. Raises KeyError for another setting."""
    convert = {"mode": backend.Mode, "prefetch": str, "lora": "on".__eq__, "draft_bits": int,
               "depth": lambda text: text if text == "auto" else int(text)}  # fmt: skip
    return {name: convert[name](value)}


def quality(stats: EngineStats | None) -> str:
    """HTML: what the quality of the words depends on, a chip each, and one sentence that says it."""
    if stats is None:
        return ""
    heads = stats.routing == "prerouter"
    chips = [_chip(f"{stats.expert_format} experts", "How the experts' weights are kept"),
             _chip("prerouter routing" if heads else "own router", "What picks the experts of a token")]  # fmt: skip
    if MODES[stats.mode].lora:
        name = "recovery LoRA" if stats.lora else "LoRA off"
        chips.append(_chip(name, "A correction trained with the heads", stats.lora))
    if MODES[stats.mode].draft and stats.draft_bits:
        hint = "What it drafts is kept only where the model itself agrees"
        chips.append(_chip(f"{stats.draft_bits}-bit draft", hint, not stats.draft_parked))
    return f'<h4>Quality</h4><p class="or-chips">{"".join(chips)}</p><p class="or-aside">{quality_line(stats)}</p>'


def quality_line(stats: EngineStats) -> str:
    experts = f"Experts {_FORMATS[stats.expert_format]}"
    if MODES[stats.mode].draft:
        return f"{experts}, picked by the model's own router, and every token checked: the draft costs no quality."
    if stats.routing != "prerouter":
        return f"{experts}, picked by the model's own router: the words do not depend on the memory you give."
    if stats.lora:
        return f"{experts}, picked a token early by the prerouter heads; the recovery LoRA makes up for some of that."
    return f"{experts}, picked a token early by the prerouter heads, with nothing to make up for that."


def _chip(text: str, hint: str, on: bool = True) -> str:
    return f'<span class="or-chip{"" if on else " off"}" title="{hint}">{escape(text)}</span>'


def mode_words(stats: EngineStats) -> str:
    """The mode a reply was written in, for the line below it: `Edge0 with LoRA`, `Specter with a 4-bit draft`."""
    mode = MODES[stats.mode]
    if mode.lora:
        return mode.title + (" with LoRA" if stats.lora else " without LoRA")
    return mode.title + (f" with a {stats.draft_bits}-bit draft" if mode.draft and stats.draft_bits else "")
