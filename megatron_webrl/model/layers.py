"""Layers of the text model: attention within each sample of a packed row, DeepStack, and the layer spec."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_webrl.model.norm import RMSNorm


@dataclass
class RowParams(PackedSeqParams):
    """What every layer of the decoder needs to know of a packed row.

    The format is "sbhd" although samples are packed: under "thd" Megatron would restart the rotary angles at
    each sample by slicing them from the row's start, which is wrong for m-RoPE. Here each token brings its angles.
    """

    boundaries: tuple[int, ...] = ()  # [samples + 1], the first token of each sample, then T
    visual_positions: Tensor | None = None  # int64 [V], row positions of image tokens
    deepstack: tuple[Tensor, ...] = ()  # per early layer: [V, hidden], added to its output at visual_positions


class PackedAttention(torch.nn.Module):
    """Causal attention within each sample of a row, with grouped queries. No [T, T] mask is made."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError(f"context_parallel_size={config.context_parallel_size} is not supported; use 1")
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: RowParams,
    ) -> Tensor:
        """[T, 1, heads * dim] from query [T, 1, heads, dim], key and value [T, 1, groups, dim]."""
        heads, groups = query.shape[2], key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [1, heads, T, dim]
        parts = [
            scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, start:end],
                v[:, :, start:end],
                is_causal=True,
                scale=self.scale,
                enable_gqa=heads != groups,
            )
            for start, end in pairwise(packed_seq_params.boundaries)
        ]
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(query.shape[0], 1, -1)


class DeepStackLayer(TransformerLayer):
    """A transformer layer that adds visual features to its output, if the row brings any for it."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Output [T, 1, hidden] and context, as TransformerLayer gives them."""
        output, context = super().forward(*args, **kwargs)
        params: RowParams = kwargs["packed_seq_params"]
        index = self.layer_number - 1
        if index < len(params.deepstack):
            features = params.deepstack[index].to(output.dtype)
            output = output.index_add(0, params.visual_positions, features[:, None])
        return output, context


def layer_spec() -> ModuleSpec:
    """One decoder layer from Megatron's own parts that run on any device."""
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        k_layernorm=RMSNorm,
    )
    return ModuleSpec(
        module=DeepStackLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(config: TransformerConfig, groups: ProcessGroupCollection) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm."""
    count = get_num_layers_to_build(config, None, get_pg_rank(groups.pp))
    return TransformerBlockSubmodules(layer_specs=[layer_spec()] * count, layer_norm=RMSNorm)
