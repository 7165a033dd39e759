"""Read and check the configuration of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.system.text import first_line

ARCHITECTURES = ("qwen3_vl", "qwen3_vl_moe")


def load_hf_config(folder: str | Path) -> Any:
    """Load the transformers configuration of a Qwen3-VL folder. Raises ValueError for unsupported models or options."""
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no readable config.json: {first_line(error)}") from error
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(f"{folder} holds model_type={hf.model_type!r}; only {' and '.join(ARCHITECTURES)} are known")
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
    return hf


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Read config.json of a model folder without transformers. Raises ConfigError unless it is a Qwen3-VL."""
    folder = Path(path)
    if not str(path):
        raise ConfigError("model.path is empty; give a Hugging Face folder, or make one with tools/make_tiny_model.py")
    if not folder.is_dir():
        raise ConfigError(
            f"model.path={path} is not a folder; give a Hugging Face folder, or make one with tools/make_tiny_model.py"
        )
    try:
        config_json = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path={path} holds no config.json; give a complete Hugging Face folder") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"model.path={path}: config.json is not valid JSON ({error})") from error
    if config_json.get("model_type") not in ARCHITECTURES:
        raise ConfigError(
            f"model.path={path} holds model_type={config_json.get('model_type')!r}; "
            f"only {' and '.join(ARCHITECTURES)} are known"
        )
    return config_json
