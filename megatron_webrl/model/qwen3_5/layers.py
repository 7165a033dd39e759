"""Layers of Qwen3.5's text model: Gated DeltaNet and gated attention, and Megatron's configuration of them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_webrl.model.compute_options import ComputeOptions, LayerImplementation
from megatron_webrl.model.parameter_map import is_linear_attention, is_sparse
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.qwen3_5.attention import GatedAttention
from megatron_webrl.model.qwen3_5.delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron_webrl.model.vision_language.layers import attention_spec, layer_modules, layer_spec
from megatron_webrl.model.vision_language.text_config import TextConfig
from megatron_webrl.model.vision_language.text_config import make_text_config as make_base_config


def make_text_config(
    hf_config: Any, dtype: torch.dtype, platform: Platform, groups: ProcessGroupCollection, options: ComputeOptions
) -> TextConfig:
    """Make Megatron's config of the text model. Raises ValueError if the parallel sizes do not divide it."""
    text = hf_config.text_config
    return make_base_config(
        hf_config,
        dtype,
        platform,
        groups,
        options,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        hetereogenous_dist_checkpoint=True,  # layers have different parameters: a checkpoint holds each on its own
        linear_num_key_heads=text.linear_num_key_heads,
        linear_num_value_heads=text.linear_num_value_heads,
        linear_key_head_dim=text.linear_key_head_dim,
        linear_value_head_dim=text.linear_value_head_dim,
        linear_conv_kernel_dim=text.linear_conv_kernel_dim,
        moe_shared_expert_intermediate_size=getattr(text, "shared_expert_intermediate_size", None),
        moe_shared_expert_gate=True,
    )


def block_spec(text_config: Any, layers: range, implementation: LayerImplementation) -> TransformerBlockSubmodules:
    """Specs of the layers and the final norm of a model chunk. `text_config`: of transformers."""
    parts = layer_modules(implementation)
    delta_net = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(parts.column, parts.row))
    attention = attention_spec(parts, GatedAttention)
    specs = [
        layer_spec(
            parts, delta_net if is_linear_attention(text_config, layer) else attention, is_sparse(text_config, layer)
        )
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.norm)
