"""Causal attention within each segment of a packed sequence, and to the segments before it.

Context parallelism follows DeepSpeed-Ulysses (arXiv 2309.14509): outside attention a rank has its shard of the tokens
with all heads; inside, between two all-to-alls, it has all tokens with its shard of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_pg_size
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from megatron_webrl.model.compute_options import AttentionKernel
from megatron_webrl.model.vision_language.packed_input import causal_mask, select_keys
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams, TextConfig

CAUSAL_WINDOW = (-1, 0)  # all tokens before a token, none after it


class TextAttention(SelfAttention):
    """Megatron's attention, whose values are a view of the whole projection: kept, they would keep that."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Query, key, value [T, 1, heads or groups, dim]."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return query, key, value.contiguous()


class PackedAttention(torch.nn.Module):
    """Rotary embedding, and grouped-query attention, computed per segment without a [T, T] mask."""

    def __init__(
        self,
        config: TextConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale
        self.kernel: AttentionKernel = config.attention_kernel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: MultimodalPackedSeqParams,
    ) -> Tensor:
        """[T, 1, heads * dim] from query [T, 1, heads, dim] and key, value [T, 1, groups, dim], T of this rank."""
        tokens = query.shape[0]
        assert packed_seq_params.rotation is not None
        query, key = packed_seq_params.rotation(query), packed_seq_params.rotation(key)
        if get_pg_size(self.cp_group) > 1:
            query, key, value = (_all_tokens(x, self.cp_group) for x in (query, key, value))
        output = select_kernel(self.kernel, query)(query, key, value, packed_seq_params, self.scale)
        if get_pg_size(self.cp_group) > 1:
            output = _all_heads(output.reshape(query.shape), self.cp_group)
        return output.reshape(tokens, 1, -1)


def _all_tokens(mine: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all from token shards [t, 1, heads, dim] to head shards [ranks * t, 1, heads / ranks, dim]."""
    ranks, (tokens, _, heads, dim) = get_pg_size(group), mine.shape
    by_rank = mine.reshape(tokens, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    return all_to_all(group, by_rank).reshape(ranks * tokens, 1, heads // ranks, dim)


def _all_heads(mine: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all from head shards [ranks * t, 1, heads, dim] to token shards [t, 1, ranks * heads, dim]."""
    ranks, (tokens, _, heads, dim) = get_pg_size(group), mine.shape
    by_rank = mine.reshape(ranks, tokens // ranks, heads, dim).contiguous()
    return all_to_all(group, by_rank).transpose(0, 1).reshape(tokens // ranks, 1, ranks * heads, dim)


def select_kernel(name: AttentionKernel, query: Tensor) -> Callable[..., Tensor]:
    """The function of a kernel; `auto` is the variable-length one where it exists, for half precision on CUDA."""
    if name == "auto":
        name = "varlen" if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else "sdpa"
    return {"sdpa": per_segment, "varlen": varlen, "flash": flash}[name]


def per_segment(
    query: Tensor, key: Tensor, value: Tensor, params: MultimodalPackedSeqParams, scale: float | None
) -> Tensor:
    """[T, 1, heads, dim], by one call of PyTorch's attention per segment."""
    grouped = query.shape[2] != key.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [1, heads, T, dim]
    parts = []
    for segment, (start, end) in enumerate(pairwise(params.segment_boundaries)):
        ranges = ((start, end),) if params.keys is None else params.keys.ranges[segment]
        queries, keys, values = q[:, :, start:end], select_keys(k, ranges), select_keys(v, ranges)
        mask = None
        if queries.shape[2] < keys.shape[2]:
            mask = params.masks.get(segment)
            if mask is None:  # made once for all layers, which save it for the backward pass
                mask = params.masks[segment] = causal_mask(queries, keys.shape[2])
        parts.append(
            scaled_dot_product_attention(
                queries, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3)


def varlen(query: Tensor, key: Tensor, value: Tensor, params: MultimodalPackedSeqParams, scale: float | None) -> Tensor:
    """[T, heads, dim], by one call of PyTorch's variable-length kernel for all segments.

    Like flash-attn's (version 2.1 on), the kernel aligns the causal mask to the last query and the last key, as
    `torch.nn.attention.bias` notes, so that queries see all keys of the segments before theirs.
    """
    from torch.nn.attention.varlen import varlen_attn

    key, value = _keys_by_segment(key, params), _keys_by_segment(value, params)
    output = varlen_attn(
        query.squeeze(1), key.squeeze(1), value.squeeze(1), params.cu_seqlens_q, params.cu_seqlens_kv,
        _longest_segment(params), _most_keys(params),
        scale=scale, window_size=CAUSAL_WINDOW, enable_gqa=query.shape[2] != key.shape[2],
    )  # fmt: skip
    assert isinstance(output, Tensor)  # a tuple only if more was asked for
    return output


def _keys_by_segment(tokens: Tensor, params: MultimodalPackedSeqParams) -> Tensor:
    """Keys or values [keys, 1, groups, dim] of one segment after the other, with those of its ancestors."""
    return tokens if params.key_positions is None else tokens.index_select(0, params.key_positions)


def _longest_segment(params: MultimodalPackedSeqParams) -> int:
    return max(end - start for start, end in pairwise(params.segment_boundaries))


def _most_keys(params: MultimodalPackedSeqParams) -> int:
    return _longest_segment(params) if params.keys is None else max(params.keys.lengths)


def flash(query: Tensor, key: Tensor, value: Tensor, params: MultimodalPackedSeqParams, scale: float | None) -> Tensor:
    """[T, heads, dim], by one call of flash-attn's variable-length kernel for all segments, masked as in `varlen`."""
    from flash_attn import __version__, flash_attn_varlen_func

    if params.keys is not None and tuple(map(int, __version__.split(".")[:2])) < (2, 1):
        raise RuntimeError(
            f"flash-attn {__version__} cannot compute common prefixes, which need 2.1; "
            "install it, or set trainer.merge_prefixes=trajectory"
        )
    key, value = _keys_by_segment(key, params), _keys_by_segment(value, params)
    return flash_attn_varlen_func(
        query.squeeze(1),
        key.squeeze(1),
        value.squeeze(1),
        cu_seqlens_q=params.cu_seqlens_q,
        cu_seqlens_k=params.cu_seqlens_kv,
        max_seqlen_q=_longest_segment(params),
        max_seqlen_k=_most_keys(params),
        softmax_scale=scale,
        causal=True,
    )
