"""Which configurations of Qwen3.5 are supported. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_webrl.model.layer_split import check_divides
from megatron_webrl.model.vision_language.config_check import check_text_options


def check_config(folder: str | Path, hf: Any) -> None:
    """Raise ValueError for an unsupported option of a transformers configuration."""
    text = hf.text_config
    check_text_options(folder, text)
    unknown = set(text.layer_types) - {"linear_attention", "full_attention"}
    if unknown:
        raise ValueError(f"{folder}: text_config.layer_types={min(unknown)!r} is not supported")
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    check_divides("linear_num_key_heads", keys, "linear_num_value_heads", values, str(folder))
