"""Which configurations of Qwen3-VL are supported. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check_config(folder: str | Path, hf: Any) -> None:
    """Raise ValueError for an unsupported option of a transformers configuration."""
    text = hf.text_config
    rope = text.rope_parameters
    for name, value, supported in (
        ("attention_bias", text.attention_bias, False),
        ("attention_dropout", text.attention_dropout, 0),
        ("hidden_act", text.hidden_act, "silu"),
        ("rope_type", rope["rope_type"], "default"),
    ):
        if value != supported:
            raise ValueError(f"{folder}: text_config.{name}={value!r} is not supported; only {supported!r} is")
    if sum(rope.get("mrope_section", ())) != text.head_dim // 2:
        raise ValueError(
            f"{folder}: mrope_section={rope.get('mrope_section')} must sum to head_dim / 2 = {text.head_dim // 2}"
        )
    count = len(hf.vision_config.deepstack_visual_indexes)
    if count > text.num_hidden_layers:
        raise ValueError(f"{folder}: deepstack_visual_indexes has {count} entries for {text.num_hidden_layers} layers")
