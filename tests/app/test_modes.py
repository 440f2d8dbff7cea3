"""Every mode is described, one that cannot be had says why, and what is shown of the quality is what is in force."""

from __future__ import annotations

import re

import pytest

from app import modes
from app.__main__ import engine_config, parser
from app.modes import MODES, Choices
from engine import EXPERT_FORMATS, PREFETCH, EngineConfig, EngineStats, Mode
from engine.config import DRAFT_BITS, MAX_DEPTH

EDGE0 = EngineStats(mode="edge0", routing="prerouter", lora=True, expert_format="int4")


def buttons(html: str) -> dict[tuple[str, str], dict[str, bool]]:
    """The chooser's buttons: (setting, value) -> what they say of themselves."""
    found = re.findall(r'<button [^>]*data-set="(\w+)" data-value="([\w-]+)"([^>]*)>', html)
    checked = re.findall(r'<button [^>]*aria-checked="(\w+)"', html)
    return {(name, value): {"on": on == "true", "able": " disabled" not in rest}
            for (name, value, rest), on in zip(found, checked, strict=True)}  # fmt: skip


def test_every_mode_prefetch_and_format_is_described():
    assert set(MODES) == {mode.value for mode in Mode}
    assert set(modes.PREFETCH) == set(PREFETCH)
    assert modes.DRAFT_BITS == DRAFT_BITS and 0 < min(modes.DEPTHS) and max(modes.DEPTHS) <= MAX_DEPTH
    for fmt in EXPERT_FORMATS:
        assert f"{fmt} experts" in modes.quality(EngineStats(expert_format=fmt))


def test_what_can_be_chosen_follows_from_the_mode():
    every = dict.fromkeys(MODES)
    on_demand = buttons(modes.chooser(Choices(every, EngineConfig(prefetch="gate"))))
    assert on_demand == {
        ("mode", "on-demand"): {"on": True, "able": True}, ("mode", "edge0"): {"on": False, "able": True},
        ("mode", "specter"): {"on": False, "able": True},
        ("prefetch", "auto"): {"on": False, "able": True}, ("prefetch", "gate"): {"on": True, "able": True},
        ("prefetch", "none"): {"on": False, "able": True}}  # fmt: skip
    html = modes.chooser(Choices(every, EngineConfig(mode=Mode.EDGE0)))
    assert "The prerouter heads" in html
    assert [key for key, state in buttons(html).items() if state["on"]] == [("mode", "edge0"), ("lora", "off")]
    assert ("prefetch", "gate") not in buttons(html) and ("prefetch", "none") not in buttons(html)
    without = EngineConfig(mode=Mode.EDGE0, lora=False)
    assert buttons(modes.chooser(Choices(every, without)))["lora", "on"]["on"] is False
    assert modes.chooser(None) == ""


def test_in_specter_the_draft_looks_ahead_and_its_depth_and_bits_can_be_chosen():
    def chosen(**settings) -> tuple[str, list[tuple[str, str]], list[tuple[str, str]]]:
        html = modes.chooser(Choices(dict.fromkeys(MODES), EngineConfig(mode=Mode.SPECTER, **settings)))
        found = buttons(html)
        return html, [key for key in found if key[0] != "mode"], [key for key, state in found.items() if state["on"]]

    html, offered, on = chosen()
    assert "The draft</em>" in html
    assert offered == [("depth", "auto"), *(("depth", str(n)) for n in (2, 4, 8, 16)),
                       *(("draft_bits", str(n)) for n in (4, 3, 2))]  # fmt: skip
    assert on == [("mode", "specter"), ("depth", "auto"), ("draft_bits", "4")]
    assert chosen(depth=8, draft_bits=2)[2] == [("mode", "specter"), ("depth", "8"), ("draft_bits", "2")]
    _, offered, on = chosen(depth=5)  # set elsewhere: it is shown too
    assert [value for name, value in offered if name == "depth"] == ["auto", "2", "4", "5", "8", "16"]
    assert ("depth", "5") in on


def test_what_cannot_be_had_is_disabled_and_says_why():
    reasons = {
        "on-demand": None,
        "edge0": "tiny <b> has no prerouter heads: train them with `python -m engine train tiny`",
        "specter": None,
    }
    html = modes.chooser(Choices(reasons, EngineConfig(prefetch="none"), gate=False))
    assert not buttons(html)["mode", "edge0"]["able"] and not buttons(html)["prefetch", "gate"]["able"]
    assert "tiny &lt;b&gt; has no prerouter heads" in html and "<code>python -m engine train tiny</code>" in html
    assert "no gate that can be asked early" in html
    html = modes.chooser(Choices(dict.fromkeys(MODES), EngineConfig(mode=Mode.SPECTER), drafts=(4, 3)))
    able = {value: button["able"] for (name, value), button in buttons(html).items() if name == "draft_bits"}
    assert able == {"4": True, "3": True, "2": False} and "a draft of 3 and 4 bits" in html
    html = modes.chooser(Choices(dict.fromkeys(MODES), EngineConfig(mode=Mode.EDGE0), has_lora=False))
    assert buttons(html)["lora", "on"] == {"on": False, "able": False} and "came without one" in html


def test_a_button_becomes_a_setting_and_nothing_else_does(backend):
    assert modes.setting(backend, "mode", "edge0") == {"mode": Mode.EDGE0}
    assert modes.setting(backend, "prefetch", "none") == {"prefetch": "none"}
    assert [modes.setting(backend, "lora", word)["lora"] for word in ("on", "off")] == [True, False]
    assert [modes.setting(backend, "depth", word)["depth"] for word in ("auto", "8")] == ["auto", 8]
    assert modes.setting(backend, "draft_bits", "3") == {"draft_bits": 3}
    with pytest.raises(KeyError):
        modes.setting(backend, "model", "elsewhere")
    with pytest.raises(ValueError):
        modes.setting(backend, "mode", "unheard of")


@pytest.mark.parametrize(("stats", "chips", "words"), [
    (EngineStats(expert_format="bf16"), ["bf16 experts", "own router"], "On demand"),
    (EDGE0, ["int4 experts", "prerouter routing", "recovery LoRA"], "Edge0 with LoRA"),
    (EngineStats(mode="edge0", routing="prerouter", expert_format="int8"),
     ["int8 experts", "prerouter routing", "LoRA off"], "Edge0 without LoRA"),
    (EngineStats(mode="specter", expert_format="bf16", draft_bits=3),
     ["bf16 experts", "own router", "3-bit draft"], "Specter with a 3-bit draft"),
    (EngineStats(mode="specter", expert_format="bf16"), ["bf16 experts", "own router"], "Specter")])  # fmt: skip
def test_quality_says_what_is_in_force(stats, chips, words):
    html = modes.quality(stats)
    assert re.findall(r'<span class="or-chip[^>]*>([^<]*)<', html) == chips
    assert ("or-chip off" in html) is (chips[-1] == "LoRA off")
    assert modes.mode_words(stats) == words
    assert modes.quality(None) == ""


def test_a_draft_that_was_given_up_is_shown_as_off():
    html = modes.quality(EngineStats(mode="specter", expert_format="bf16", draft_bits=4, draft_parked=True))
    assert re.findall(r'or-chip off"[^>]*>([^<]*)<', html) == ["4-bit draft"]
    assert "the draft costs no quality" in html


def test_the_command_line_sets_the_mode_or_refuses_it_readably(backend):
    def config(*arguments: str):
        return engine_config(backend, parser().parse_args(arguments))

    assert (config().mode, config().lora) == (Mode.ON_DEMAND, True)
    chosen = config("--mode", "edge0", "--no-lora")
    assert (chosen.mode, chosen.lora) == (Mode.EDGE0, False)
    specter = config("--mode", "specter", "--depth", "6", "--draft-bits", "3")
    assert (specter.mode, specter.depth, specter.draft_bits) == (Mode.SPECTER, 6, 3)
    assert (config("--depth", "auto").depth, config().depth) == ("auto", "auto")
    with pytest.raises(backend.ConfigError, match="depth 'deep' is not possible: choose auto"):
        config("--depth", "deep")
    with pytest.raises(backend.ConfigError, match="mode 'edge' is unknown: choose from on-demand, edge0, specter"):
        config("--mode", "edge")
