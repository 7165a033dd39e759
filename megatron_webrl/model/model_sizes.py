"""Dimensions of the released Qwen3-VL models, from their config.json. Instruct and Thinking share them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megatron_webrl.system import torchvision_shim


@dataclass(frozen=True)
class ReleasedDimensions:
    """What differs between the sizes."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tied: bool = False
    small_vision: bool = False  # the tower of 24 layers instead of 27
    num_experts: int = 0
    moe_intermediate_size: int = 0


MODEL_SIZES = {
    "2B": ReleasedDimensions(2048, 28, 16, 8, 6144, tied=True, small_vision=True),
    "4B": ReleasedDimensions(2560, 36, 32, 8, 9728, tied=True, small_vision=True),
    "8B": ReleasedDimensions(4096, 36, 32, 8, 12288),
    "32B": ReleasedDimensions(5120, 64, 64, 8, 25600),
    "30B-A3B": ReleasedDimensions(2048, 48, 32, 4, 6144, num_experts=128, moe_intermediate_size=768),
    "235B-A22B": ReleasedDimensions(4096, 94, 64, 4, 12288, num_experts=128, moe_intermediate_size=1536),
}
SMALL_VISION = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}


def config_sections(name: str) -> dict[str, Any]:
    """What config.json says of a released size, as far as shapes follow from it. Raises KeyError for any other name."""
    sizes = MODEL_SIZES[name]
    text: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "intermediate_size": sizes.intermediate_size,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "tie_word_embeddings": sizes.tied,
    }
    if sizes.num_experts:
        text |= {
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": sizes.moe_intermediate_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    vision = {
        **(SMALL_VISION if sizes.small_vision else VISION),
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": sizes.hidden_size,
    }
    return {
        "model_type": "qwen3_vl_moe" if sizes.num_experts else "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": sizes.tied,
    }


def size_from_path(path: str) -> str | None:
    """The released size that a folder's name says it holds, such as 8B of models/Qwen3-VL-8B-Instruct."""
    match = re.fullmatch(r"Qwen3-VL-(.+?)(-Instruct|-Thinking)?", PurePath(path).name)
    return match[1] if match and match[1] in MODEL_SIZES else None


def make_hf_config(name: str) -> Any:
    """The transformers configuration of a released size. Raises KeyError for any other name."""
    torchvision_shim.install()
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    found = config_sections(name)
    kind: Any = Qwen3VLMoeConfig if MODEL_SIZES[name].num_experts else Qwen3VLConfig
    del found["model_type"]
    return kind(**found)
