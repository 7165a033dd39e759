"""Which options of a text model are supported. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def rotary_dim(text: Any) -> int:
    """Number of a head's dimensions that are rotated, the first ones. `text`: the text config of transformers."""
    return int(text.head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0))


def check_text_options(folder: str | Path, text: Any) -> None:
    """Raise ValueError for an unsupported option of attention, MLP or rotary angles."""
    rope = text.rope_parameters
    for name, value, supported in (
        ("attention_bias", text.attention_bias, False),
        ("attention_dropout", text.attention_dropout, 0),
        ("hidden_act", text.hidden_act, "silu"),
        ("rope_type", rope["rope_type"], "default"),
    ):
        if value != supported:
            raise ValueError(f"{folder}: text_config.{name}={value!r} is not supported; only {supported!r} is")
    dim = rotary_dim(text)
    if sum(rope.get("mrope_section", ())) != dim // 2:
        rotated = "head_dim" if dim == text.head_dim else "head_dim * partial_rotary_factor"
        raise ValueError(f"{folder}: mrope_section={rope.get('mrope_section')} must sum to {rotated} / 2 = {dim // 2}")
