"""The parameter map of a model, by the architecture that `model_type` of its config.json names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_webrl.model.parameter_map import REPLICATED, VOCABULARY, ExpertFormat, ParameterMapping
from megatron_webrl.model.qwen3_5 import parameters as qwen3_5
from megatron_webrl.model.qwen3_vl import parameters as qwen3_vl
from megatron_webrl.model.vision_language.parameters import vision_mappings

LayerMappings = Callable[[Any, int, str, str, ExpertFormat], list[ParameterMapping]]
LAYER_MAPPINGS: dict[str, LayerMappings] = {
    "qwen3_vl": qwen3_vl.layer_mappings,
    "qwen3_vl_moe": qwen3_vl.layer_mappings,
    "qwen3_5": qwen3_5.layer_mappings,
    "qwen3_5_moe": qwen3_5.layer_mappings,
}
"""Mappings of one layer from the text config, the layer, prefixes of tensors and parameters, and the expert format."""
PASSTHROUGH_PREFIXES = {"qwen3_5": qwen3_5.PASSTHROUGH_PREFIX, "qwen3_5_moe": qwen3_5.PASSTHROUGH_PREFIX}
"""Tensors of released folders that have no parameter: conversion and checkpoints keep them bit for bit."""


def is_passthrough(model_type: str, name: str) -> bool:
    """Whether a tensor of an architecture's folders is kept without a parameter."""
    return model_type in PASSTHROUGH_PREFIXES and name.startswith(PASSTHROUGH_PREFIXES[model_type])


def parameter_mappings(hf_config: Any, expert_format: ExpertFormat = "released") -> tuple[ParameterMapping, ...]:
    """Mappings of all tensors in export order: parts of a tensor are adjacent, and so are tensors of one parameter."""
    text, layer_mappings = hf_config.text_config, LAYER_MAPPINGS[hf_config.model_type]
    maps = vision_mappings(hf_config.vision_config)
    width = (text.vocab_size, text.hidden_size)
    lm = "model.language_model."
    maps.append(ParameterMapping(f"{lm}embed_tokens.weight", width, "embedding.word_embeddings.weight", VOCABULARY))
    for layer in range(text.num_hidden_layers):
        maps += layer_mappings(text, layer, f"{lm}layers.{layer}.", f"decoder.layers.{layer}.", expert_format)
    maps.append(ParameterMapping(f"{lm}norm.weight", (text.hidden_size,), "decoder.final_layernorm.weight", REPLICATED))
    if not hf_config.tie_word_embeddings:
        maps.append(ParameterMapping("lm_head.weight", width, "output_layer.weight", VOCABULARY))
    return tuple(maps)
