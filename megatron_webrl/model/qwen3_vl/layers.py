"""Layers of Qwen3-VL's text model."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_webrl.model.compute_options import LayerImplementation
from megatron_webrl.model.parameter_map import is_sparse
from megatron_webrl.model.vision_language.layers import attention_spec, layer_modules, layer_spec


def block_spec(text_config: Any, layers: range, implementation: LayerImplementation) -> TransformerBlockSubmodules:
    """Specs of the layers and the final norm of a model chunk. `text_config`: of transformers."""
    parts = layer_modules(implementation)
    specs = [layer_spec(parts, attention_spec(parts), is_sparse(text_config, layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.norm)
