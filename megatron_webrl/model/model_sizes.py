"""Dimensions of the released models, from their config.json. Instruct and Thinking models of Qwen3-VL share them."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from megatron_webrl.model.qwen3_5 import sizes as qwen3_5
from megatron_webrl.util import torchvision_shim

_TEXT_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "moe_intermediate_size",
)
MODEL_SIZES = {  # of Qwen3-VL: values of _TEXT_FIELDS; a dense model has no experts
    "2B": (2048, 28, 16, 8, 6144),
    "4B": (2560, 36, 32, 8, 9728),
    "8B": (4096, 36, 32, 8, 12288),
    "32B": (5120, 64, 64, 8, 25600),
    "30B-A3B": (2048, 48, 32, 4, 6144, 128, 768),
    "235B-A22B": (4096, 94, 64, 4, 12288, 128, 1536),
}
TIED_SIZES = ("2B", "4B")  # tied embeddings and the smaller vision tower
QWEN3_5_NAMES = tuple(qwen3_5.MODEL_SIZES)
RELEASED = (*MODEL_SIZES, *QWEN3_5_NAMES)
_EITHER_VISION = {
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
SMALL_VISION = {
    **_EITHER_VISION,
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
VISION = {
    **_EITHER_VISION,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def config_sections(name: str) -> dict[str, Any]:
    """The parts of a released model's config.json that determine shapes. Raises KeyError for one not in RELEASED."""
    if name in QWEN3_5_NAMES:
        return qwen3_5.config_sections(name, SMALL_VISION, VISION)
    tied = name in TIED_SIZES
    text: dict[str, Any] = {
        **dict(zip(_TEXT_FIELDS, MODEL_SIZES[name], strict=False)),
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "tie_word_embeddings": tied,
    }
    sparse = "num_experts" in text
    if sparse:
        text |= {"num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision = {**(SMALL_VISION if tied else VISION), "out_hidden_size": text["hidden_size"]}
    return {
        "model_type": "qwen3_vl_moe" if sparse else "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": tied,
    }


def size_from_path(path: str) -> str | None:
    """The entry of RELEASED that a folder name means, such as 8B for models/Qwen3-VL-8B-Instruct; None without one."""
    name = PurePath(path).name
    if name.removesuffix("-Base") in QWEN3_5_NAMES:
        return name.removesuffix("-Base")
    match = re.fullmatch(r"Qwen3-VL-(.+?)(-Instruct|-Thinking)?", name)
    return match[1] if match and match[1] in MODEL_SIZES else None


def make_hf_config(name: str) -> Any:
    """The transformers configuration of a released size. Raises KeyError for one not in RELEASED."""
    torchvision_shim.install()
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3VLConfig, Qwen3VLMoeConfig

    kinds: dict[str, Any] = {
        kind.model_type: kind for kind in (Qwen3VLConfig, Qwen3VLMoeConfig, Qwen3_5Config, Qwen3_5MoeConfig)
    }
    sections = config_sections(name)
    return kinds[sections.pop("model_type")](**sections)
