"""Read and check a model folder's description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError

ARCHITECTURES = ("qwen3_vl", "qwen3_vl_moe")


def load_hf_config(folder: str | Path) -> Any:
    """The folder's transformers configuration, of a dense Qwen3-VL or a mixture of experts.

    Raises ValueError if it is another architecture or uses what is not built here.
    """
    from transformers import AutoConfig

    try:
        description = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no readable config.json: {str(error).splitlines()[0]}") from error
    if description.model_type not in ARCHITECTURES:
        raise ValueError(
            f"{folder} holds model_type={description.model_type!r}; only {' and '.join(ARCHITECTURES)} are known"
        )
    text = description.text_config
    rope = text.rope_parameters
    for name, found, wanted in (
        ("attention_bias", text.attention_bias, False),
        ("attention_dropout", text.attention_dropout, 0),
        ("hidden_act", text.hidden_act, "silu"),
        ("rope_type", rope["rope_type"], "default"),
    ):
        if found != wanted:
            raise ValueError(f"{folder}: text_config.{name}={found!r} is not supported; only {wanted!r} is")
    if sum(rope.get("mrope_section", ())) != text.head_dim // 2:
        raise ValueError(
            f"{folder}: mrope_section={rope.get('mrope_section')} must sum to head_dim / 2 = {text.head_dim // 2}"
        )
    features = len(description.vision_config.deepstack_visual_indexes)
    if features > text.num_hidden_layers:
        raise ValueError(
            f"{folder}: deepstack_visual_indexes has {features} entries for {text.num_hidden_layers} layers"
        )
    return description


def read_model_config(path: str | Path) -> dict[str, Any]:
    """The model folder's config.json. Raises ConfigError if it is not a Qwen3-VL folder."""
    folder = Path(path)
    if not str(path):
        raise ConfigError("model.path is empty; give a Hugging Face folder, or make one with tools/make_tiny_model.py")
    if not folder.is_dir():
        raise ConfigError(
            f"model.path={path} is not a folder; give a Hugging Face folder, or make one with tools/make_tiny_model.py"
        )
    try:
        description = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path={path} holds no config.json; give a complete Hugging Face folder") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"model.path={path}: config.json is not valid JSON ({error})") from error
    if description.get("model_type") not in ("qwen3_vl", "qwen3_vl_moe"):
        raise ConfigError(
            f"model.path={path} holds model_type={description.get('model_type')!r}; "
            "only qwen3_vl and qwen3_vl_moe are known"
        )
    return description
