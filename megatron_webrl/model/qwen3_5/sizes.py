"""Dimensions of the released Qwen3.5 models, from their config.json. Base models share them. Imports no torch."""

from __future__ import annotations

from typing import Any

_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
)
_DENSE = (*_FIELDS, "intermediate_size")
_SPARSE = (*_FIELDS, "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok")
MODEL_SIZES: dict[str, dict[str, int]] = {
    "Qwen3.5-4B": dict(zip(_DENSE, (2560, 32, 16, 4, 32, 9216), strict=True)),
    "Qwen3.5-9B": dict(zip(_DENSE, (4096, 32, 16, 4, 32, 12288), strict=True)),
    "Qwen3.5-27B": dict(zip(_DENSE, (5120, 64, 24, 4, 48, 17408), strict=True)),
    "Qwen3.5-35B-A3B": dict(zip(_SPARSE, (2048, 40, 16, 2, 32, 512, 512, 256, 8), strict=True)),
    "Qwen3.5-122B-A10B": dict(zip(_SPARSE, (3072, 48, 32, 2, 64, 1024, 1024, 256, 8), strict=True)),
}
TIED_SIZE = "Qwen3.5-4B"  # tied embeddings and the smaller vision tower


def config_sections(name: str, small_vision: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """The parts of a model's config.json that determine shapes, with the tower of Qwen3-VL without DeepStack."""
    tied, sizes = name == TIED_SIZE, MODEL_SIZES[name]
    layers = range(1, sizes["num_hidden_layers"] + 1)
    text = {
        **sizes,
        "layer_types": ["linear_attention" if layer % 4 else "full_attention" for layer in layers],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": tied,
    }
    return {
        "model_type": "qwen3_5_moe" if "num_experts" in sizes else "qwen3_5",
        "text_config": text,
        "vision_config": (small_vision if tied else vision)
        | {"deepstack_visual_indexes": [], "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": tied,
    }
