"""Layers of Qwen3.5."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_webrl.model.compute_options import ComputeOptions, LayerImplementation
from megatron_webrl.model.parameter_map import is_linear_attention, is_sparse
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.qwen3_5.delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron_webrl.model.vision_language.layers import attention_spec, layer_modules, layer_spec
from megatron_webrl.model.vision_language.text_config import TextConfig
from megatron_webrl.model.vision_language.text_config import make_text_config as make_base_config


class GatedAttention(SelfAttention):
    """Megatron's gated attention, with the query and the gate of each head next to each other in the projection.

    Megatron puts the gates of a group after its queries. This order is that of the released tensors, of which a rank's
    part is then one range of rows in each group.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Query, key, value, gate [T, 1, heads or groups, dim] of hidden states [t, 1, hidden]."""
        projected, _ = self.linear_qkv(hidden_states)
        dim, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition // groups
        query, key, value = projected.unflatten(-1, (groups, -1)).split([2 * heads * dim, dim, dim], dim=-1)
        query, gate = query.unflatten(-1, (heads, 2, dim)).flatten(2, 3).unbind(dim=3)
        # A view would keep the whole projection for the backward pass.
        return self.q_layernorm(query), self.k_layernorm(key), value.contiguous(), gate


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
