"""Which configurations of Qwen3-VL are supported. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_webrl.model.vision_language.config_check import check_text_options


def check_config(folder: str | Path, hf: Any) -> None:
    """Raise ValueError for an unsupported option of a transformers configuration."""
    check_text_options(folder, hf.text_config)
    count = len(hf.vision_config.deepstack_visual_indexes)
    layers = hf.text_config.num_hidden_layers
    if count > layers:
        raise ValueError(f"{folder}: deepstack_visual_indexes has {count} entries for {layers} layers")
