"""The config.json of a model: read it, and refuse what cannot be trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.layer_split import check_divides
from megatron_webrl.util.text import first_line


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
        # Of these two, transformers and Megatron compute True in any case, vLLM what the folder says.
        ("mrope_interleaved", rope.get("mrope_interleaved", False), True),
        ("norm_topk_prob", getattr(text, "norm_topk_prob", True), True),
    ):
        if value != supported:
            raise ValueError(f"{folder}: text_config.{name}={value!r} is not supported; only {supported!r} is")
    dim = rotary_dim(text)
    if sum(rope.get("mrope_section", ())) != dim // 2:
        rotated = "head_dim" if dim == text.head_dim else "head_dim * partial_rotary_factor"
        raise ValueError(f"{folder}: mrope_section={rope.get('mrope_section')} must sum to {rotated} / 2 = {dim // 2}")


def check_qwen3_vl(folder: str | Path, hf: Any) -> None:
    """Raise ValueError for an unsupported option of a transformers configuration."""
    check_text_options(folder, hf.text_config)
    count = len(hf.vision_config.deepstack_visual_indexes)
    layers = hf.text_config.num_hidden_layers
    if count > layers:
        raise ValueError(f"{folder}: deepstack_visual_indexes has {count} entries for {layers} layers")


def check_qwen3_5(folder: str | Path, hf: Any) -> None:
    """Raise ValueError for an unsupported option of a transformers configuration."""
    text = hf.text_config
    check_text_options(folder, text)
    unknown = set(text.layer_types) - {"linear_attention", "full_attention"}
    if unknown:
        raise ValueError(f"{folder}: text_config.layer_types={min(unknown)!r} is not supported")
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    check_divides("linear_num_key_heads", keys, "linear_num_value_heads", values, str(folder))


ARCHITECTURES: dict[str, Callable[[str | Path, Any], None]] = {
    "qwen3_vl": check_qwen3_vl,
    "qwen3_vl_moe": check_qwen3_vl,
    "qwen3_5": check_qwen3_5,
    "qwen3_5_moe": check_qwen3_5,
}
"""Check of a transformers configuration by model_type. Raises ValueError for an unsupported option."""


def has_experts(description: Mapping[str, Any]) -> bool:
    """Whether a model is a mixture of experts. `description`: its config.json."""
    return bool(description["model_type"].endswith("_moe"))


def has_linear_attention(description: Mapping[str, Any]) -> bool:
    """Whether some layers of a model are linear attention. `description`: its config.json."""
    return bool(description["model_type"].startswith("qwen3_5"))


def cpu_engine_obstacle(description: Mapping[str, Any], dtype: str) -> str:
    """Why vLLM's CPU build cannot compute a model in a type; empty if it can."""
    if not has_linear_attention(description):
        return ""
    if dtype != "bfloat16":
        return f"vLLM computes linear attention on the CPU in bfloat16 only, not in {dtype}"
    text = description["text_config"]
    widths = text["linear_key_head_dim"], text["linear_value_head_dim"]
    if widths != (128, 128):
        return (
            f"vLLM computes linear attention on the CPU with heads of width 128 only, not {widths[0]} and {widths[1]}"
        )
    return ""


def choose_prefix_merging(setting: str, description: Mapping[str, Any]) -> str:
    """The value that trainer.merge_prefixes has for a model; auto merges what its layers can continue."""
    if setting != "auto":
        return setting
    return "trajectory" if has_linear_attention(description) else "all"


def load_hf_config(folder: str | Path) -> Any:
    """Load the transformers configuration of a model folder. Raises ValueError for unsupported models or options."""
    from transformers import AutoConfig

    if not Path(folder).is_dir():  # from_pretrained would ask the network
        raise ValueError(f"{folder} is not a folder")
    try:
        hf = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no readable config.json: {first_line(error)}") from error
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(f"{folder} holds model_type={hf.model_type!r}; only {', '.join(ARCHITECTURES)} are known")
    ARCHITECTURES[hf.model_type](folder, hf)
    return hf


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Read config.json of a model folder without transformers. Raises ConfigError if no job can train it."""
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
            f"only {', '.join(ARCHITECTURES)} can be trained and served"
        )
    return config_json
