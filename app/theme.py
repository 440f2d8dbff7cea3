"""The look in one place: ink and paper with one green, system fonts only, nothing fetched from anywhere."""

from __future__ import annotations

import gradio as gr
from gradio.themes.utils import sizes
from gradio.themes.utils.colors import Color

_GREEN = Color(
    name="outrider", c50="#eef7f4", c100="#d8ede7", c200="#b1dacf", c300="#80c2b2", c400="#4da592", c500="#1f8676",
    c600="#0f6b5f", c700="#0d564d", c800="#0c453e", c900="#0b3933", c950="#06211e",
)  # fmt: skip
_INK = Color(
    name="ink", c50="#faf9f6", c100="#f3f1ec", c200="#e5e2da", c300="#cfcbc0", c400="#9c9a90", c500="#73736b",
    c600="#565852", c700="#3a3f3b", c800="#222826", c900="#181d1c", c950="#111514",
)  # fmt: skip
_SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]


def theme(css: str) -> gr.themes.Base:
    """The theme, with `css` as part of it: so it reaches the sign-in page too, and is not confined to a container."""
    look = gr.themes.Base(
        primary_hue=_GREEN,
        secondary_hue=_GREEN,
        neutral_hue=_INK,
        font=_SANS,
        font_mono=_MONO,
        text_size=sizes.text_md,
        radius_size=sizes.radius_md,
        spacing_size=sizes.spacing_md,
    ).set(
        body_background_fill="*neutral_100",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_800",
        body_text_color_dark="#e4e8e5",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="#8e9a95",
        background_fill_primary="#fffefb",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary="*neutral_100",
        background_fill_secondary_dark="*neutral_950",
        border_color_primary="*neutral_200",
        border_color_primary_dark="#2b3230",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_border_width_dark="0px",
        block_shadow="none",
        block_shadow_dark="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_title_text_color="*neutral_600",
        block_title_text_color_dark="#aab5b0",
        block_title_text_size="0.8rem",
        block_info_text_color="*neutral_500",
        block_info_text_color_dark="#8e9a95",
        input_background_fill="#fffefb",
        input_background_fill_dark="#1e2423",
        input_border_width="1px",
        input_border_width_dark="1px",
        button_border_width="1px",
        button_border_width_dark="1px",
        input_border_color="*neutral_200",
        input_border_color_dark="#313836",
        input_border_color_focus="*primary_500",
        input_border_color_focus_dark="*primary_400",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="#ffffff",
        button_secondary_background_fill="#fffefb",
        button_secondary_background_fill_dark="#1e2423",
        button_secondary_border_color="*neutral_200",
        button_secondary_border_color_dark="#313836",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
        color_accent_soft="*primary_50",
        color_accent_soft_dark="#1c2f2b",
        link_text_color="*primary_600",
        link_text_color_dark="*primary_300",
    )
    look.custom_css = css
    return look
