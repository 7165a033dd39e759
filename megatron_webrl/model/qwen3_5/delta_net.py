"""Gated DeltaNet (arXiv 2412.06464) over packed sequences, its heads split over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import get_pg_size
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from torch.utils.checkpoint import checkpoint

from megatron_webrl.model.qwen3_5.delta_rule import choose_rule, short_convolution
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams, TextConfig

SHARDED = ("conv_weight", "dt_bias", "A_log")
"""Parameters that the tensor-parallel ranks split along the first dimension, beyond those of linear layers."""


@dataclass(frozen=True)
class GatedDeltaNetSubmodules:
    """Classes of the linear layers."""

    linear_in: Any
    linear_out: Any


class GatedDeltaNet(MegatronModule):
    """Projections, short convolution, gated delta rule, gated norm and output projection.

    A group is a key head with its value heads; parameters are ordered by group, see `parameters.py`. Megatron's own
    layer refuses packed sequences.
    """

    def __init__(
        self,
        config: TextConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_for_attention: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        kernel = config.linear_conv_kernel_dim
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        sizes = (keys, values, kernel, self.key_dim, self.value_dim)
        assert all(sizes), "the configuration must name the sizes of linear attention"
        self.groups, self.heads = keys // get_pg_size(self.tp_group), values // keys  # of this rank; of a group
        width = self.heads * self.value_dim
        self.convolved = (self.key_dim, self.key_dim, width)
        self.widths = (*self.convolved, width, self.heads, self.heads)
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.linear_in = submodules.linear_in(
            config.hidden_size,
            keys * sum(self.widths),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **shared,
        )
        self.linear_out = submodules.linear_out(
            keys * width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=config.params_dtype))

        self.conv_weight = parameter(self.groups * sum(self.convolved), 1, kernel)
        self.dt_bias, self.A_log = parameter(self.groups * self.heads), parameter(self.groups * self.heads)
        self.norm_weight = parameter(self.value_dim)
        self.recompute = config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: MultimodalPackedSeqParams,
        **_for_attention: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [t, 1, hidden] of hidden states [t, 1, hidden], and no bias.

        Raises ValueError for segments that continue others: the state would have to be handed to each branch.
        """
        if packed_seq_params.keys is not None:
            raise ValueError(
                "linear attention cannot continue a common prefix of several samples; "
                "set trainer.merge_prefixes=trajectory"
            )
        boundaries = packed_seq_params.segment_boundaries
        projected = self.linear_in(hidden_states)[0].squeeze(1).unflatten(-1, (self.groups, -1))
        channels, gate, strength, decay = projected.split([sum(self.convolved), *self.widths[3:]], dim=-1)
        channels = silu(short_convolution(channels.flatten(1), self.conv_weight, boundaries))
        query, key, value = channels.unflatten(-1, (self.groups, -1)).split(list(self.convolved), dim=-1)
        query, key = (x.repeat_interleave(self.heads, dim=1) for x in (query, key))
        value, gate = (x.reshape(len(x), -1, self.value_dim) for x in (value, gate))
        log_decay = -self.A_log.float().exp() * softplus(decay.flatten(1).float() + self.dt_bias)
        inputs = (query, key, value, log_decay, strength.flatten(1).sigmoid(), boundaries)
        rule = choose_rule(value, self.config.attention_kernel != "sdpa")
        if self.recompute and self.training:
            output = checkpoint(rule, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            output = rule(*inputs)
        return self.linear_out(self._gated_norm(output, gate).flatten(1)[:, None])

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Normalise each head's output and multiply it by its gate: [T, heads, value dim]."""
        wide = output.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        # Each rank applies the weight to its own heads: the backward pass sums the gradients.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return (weight * unit.to(output.dtype) * silu(gate.float())).to(output.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """As in MegatronModule, which would take this module's own parameters for replicated ones."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(SHARDED, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return sharded
