"""Linear attention of Qwen3.5: gated delta rule with a short convolution.

The gated delta rule (Gated Delta Networks, arXiv 2412.06464) and the short convolution, over packed samples.

Each head has a state S [key dim, value dim], zero at the start of a sample, and computes for token t

    S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T        o_t = S_t^T q_t

with decay a_t in (0, 1) and writing strength b_t in (0, 1). `gated_delta_rule` evaluates it in chunks.
With g_t the logarithm of the decays' product from the start of the chunk to t, and S the state before it, the values
that a chunk writes are

    U = (I + L)^-1 diag(b) (V - diag(exp g) K S),   L_ij = b_i exp(g_i - g_j) k_i.k_j for j < i, otherwise 0

and its outputs and the state after it are

    O = diag(exp g) Q S + M U,   M_ij = exp(g_i - g_j) q_i.k_j for j <= i, otherwise 0
    S' = exp(g_C) S + sum_j exp(g_C - g_j) k_j u_j^T

Chunks begin at the first token of a sample, so neither state nor convolution depends on another sample. The states of
all samples advance together: first over the first chunk of each, then over the second of those that have one.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
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
from torch.nn.functional import conv1d, silu, softplus
from torch.utils.checkpoint import checkpoint

from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams, TextConfig

log = logging.getLogger(__name__)

CHUNK = 64  # tokens

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int]], Tensor]
"""Arguments and result of `gated_delta_rule`."""


def choose_rule(value: Tensor, fused: bool) -> DeltaRule:
    """With `fused` the kernels of flash-linear-attention where it is installed: in half precision on CUDA."""
    half = value.is_cuda and value.dtype in (torch.bfloat16, torch.float16)
    return fused_gated_delta_rule if fused and half and _has_kernels() else gated_delta_rule


@cache
def _has_kernels() -> bool:
    found = importlib.util.find_spec("fla") is not None
    if not found:
        log.warning("linear attention is computed by PyTorch in float32, many times slower: install fla-core")
    return found


def fused_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, boundaries: Sequence[int]
) -> Tensor:
    """`gated_delta_rule` by flash-linear-attention, whose products are in the dtype of `value`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = (x[None] for x in (query, key, value, log_decay, strength))
    starts = _starts(tuple(boundaries), value.device)
    output, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    return output[0]


@lru_cache(maxsize=4)  # all layers of a micro-batch ask for the same
def _starts(boundaries: tuple[int, ...], device: torch.device) -> Tensor:
    return copy_to_device(torch.tensor(boundaries), device)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, boundaries: Sequence[int]
) -> Tensor:
    """Outputs [T, heads, value dim] in the dtype of `value`, computed in float32.

    `query`, `key`: [T, heads, key dim], normalised here; queries are scaled by key dim ** -0.5. `value`: [T, heads,
    value dim]. `log_decay` (at most 0) and `strength`: [T, heads]. `boundaries`: [samples + 1], first token of each
    sample, then T.
    """
    tokens, rounds = _chunk_places(tuple(boundaries), value.device)
    slots = sum(rounds) * CHUNK

    def by_chunk(x: Tensor) -> Tensor:
        """[chunks, heads, CHUNK, ...] from [T, heads, ...], zero after the end of a sample."""
        padded = x.new_zeros(slots, *x.shape[1:], dtype=torch.float32).index_copy(0, tokens, x.float())
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q = by_chunk(_unit(query)) * query.shape[-1] ** -0.5
    k, v, b = by_chunk(_unit(key)), by_chunk(value), by_chunk(strength)[..., None]
    g = by_chunk(log_decay).cumsum(dim=-1)[..., None]  # [chunks, heads, CHUNK, 1]
    # The mask before the exponential: above the diagonal the difference is positive and could overflow.
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(diagonal=1)
    decays = (g - g.mT).masked_fill(above, -torch.inf).exp()
    lower = (b * (k @ k.mT) * decays).tril(diagonal=-1)
    # Both terms of U: one from the values, one to be multiplied by the state.
    written, read = torch.linalg.solve_triangular(
        lower, torch.cat([b * v, b * g.exp() * k], dim=-1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    within, entering = (q @ k.mT) * decays, q * g.exp()
    last = g[..., -1:, :]
    leaving = (k * (last - g).exp()).mT
    outputs, state = [], v.new_zeros(rounds[0], v.shape[1], k.shape[-1], v.shape[-1])
    # `split`: the gradient of a slice would be as large as the whole, for each slice.
    parts = (x.split(rounds) for x in (written, read, entering, within, last.exp(), leaving))
    for writes, reads, enters, inside, kept, leaves in zip(*parts, strict=True):
        state = state[: len(writes)]
        update = writes - reads @ state
        outputs.append(enters @ state + inside @ update)
        state = kept * state + leaves @ update
    flat = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [chunks * CHUNK, heads, value dim]
    return flat.index_select(0, tokens).to(value.dtype)


@lru_cache(maxsize=4)
def _chunk_places(boundaries: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Place of each token among the tokens of all chunks: int64 [T], and how many samples have an n-th chunk.

    Chunks are ordered by their number within the sample, then by samples, those with most chunks first.
    """
    lengths = [end - start for start, end in pairwise(boundaries)]
    chunks = [-(-length // CHUNK) for length in lengths]
    rounds = tuple(sum(count > number for count in chunks) for number in range(max(chunks)))
    firsts = list(accumulate(rounds, initial=0))
    place = {sample: n for n, sample in enumerate(sorted(range(len(chunks)), key=lambda s: -chunks[s]))}
    places = [
        (firsts[token // CHUNK] + place[sample]) * CHUNK + token % CHUNK
        for sample, length in enumerate(lengths)
        for token in range(length)
    ]
    return copy_to_device(torch.tensor(places), device), rounds


def _unit(vectors: Tensor) -> Tensor:
    """float32, divided by the square root of the sum of squares plus 1e-6, as in the released models' code."""
    wide = vectors.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)


def short_convolution(channels: Tensor, weight: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Causal convolution of each channel within each sample: [T, C] from [T, C].

    `weight`: [C, 1, kernel], the last entry is for the token itself. `boundaries` as in `gated_delta_rule`.
    """
    before = weight.shape[-1] - 1  # zeros before each sample
    tokens = _padded_places(tuple(boundaries), before, channels.device)
    length = channels.shape[0] + before * (len(boundaries) - 1)
    padded = channels.new_zeros(length, channels.shape[1]).index_copy(0, tokens, channels)
    output = conv1d(padded.t()[None], weight, groups=channels.shape[1])[0].t()
    return output.index_select(0, tokens - before)


@lru_cache(maxsize=4)
def _padded_places(boundaries: tuple[int, ...], before: int, device: torch.device) -> Tensor:
    """Place of each token if `before` zeros precede each sample: int64 [T]."""
    places = [
        token + before * (sample + 1) for sample, ends in enumerate(pairwise(boundaries)) for token in range(*ends)
    ]
    return copy_to_device(torch.tensor(places), device)


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
