"""The attention kernel of a device, and the arguments of PyTorch's variable-length kernel."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_webrl.model.vision_language.attention import per_segment, select_kernel, varlen
from megatron_webrl.model.vision_language.packed_input import segment_keys
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams


def test_only_half_precision_on_cuda_takes_the_variable_length_kernel():
    for cuda, dtype in product((True, False), (torch.float32, torch.bfloat16)):
        kernel = select_kernel("auto", mock.Mock(is_cuda=cuda, dtype=dtype))
        assert kernel is (varlen if cuda and dtype is torch.bfloat16 else per_segment)


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, longest: int, most_keys: int,
    *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool, aligned: str,
) -> Tensor:  # fmt: skip
    """PyTorch's function, which exists on CUDA only: the causal mask ends at the last (or begins at the first) pair."""
    assert window_size == (-1, 0)
    parts = []
    for queries, keys in zip(pairwise(cu_queries.tolist()), pairwise(cu_keys.tolist()), strict=True):
        assert queries[1] - queries[0] <= longest
        assert keys[1] - keys[0] <= most_keys
        q, k, v = (x[slice(*of)].transpose(0, 1) for x, of in ((query, queries), (key, keys), (value, keys)))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        mask = visible.tril(k.shape[1] - q.shape[1] if aligned == "last" else 0)
        parts.append(scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("parents", [[-1, -1, -1, -1], [-1, 0, 0, 2]], ids=["separate", "tree"])
def test_the_variable_length_kernel_gets_the_keys_of_a_prefix_tree(parents: list[int]):
    boundaries = (0, 7, 12, 15, 24)
    keys = segment_keys(parents, boundaries)
    params = MultimodalPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor(boundaries, dtype=torch.int32),
        cu_seqlens_kv=torch.tensor(keys.boundaries if keys else boundaries, dtype=torch.int32),
        segment_boundaries=boundaries,
        keys=keys,
        key_positions=keys.positions if keys else None,
    )
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(24, 1, heads, 8, generator=generator) for heads in (4, 2, 2))
    wanted = per_segment(query, key, value, params, None).squeeze(1)
    errors = {}
    for aligned in ("last", "first"):
        with mock.patch("torch.nn.attention.varlen.varlen_attn", partial(varlen_attn, aligned=aligned)):
            errors[aligned] = float((varlen(query, key, value, params, None) - wanted).abs().max())
    assert errors["last"] < 1e-6
    assert (errors["first"] < 1e-6) == (keys is None)  # such a mask is wrong with a tree alone
