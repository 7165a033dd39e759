"""Process of the prefix tree tests: what the section "one GPU" finds on the CPU, with a kernel of each alignment."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_webrl.checks.gpu import model_section, small_models
from megatron_webrl.checks.gpu.results import CheckResult
from megatron_webrl.model.compute_options import ComputeOptions


def run(rank: int, folder: str) -> None:
    """Write found.json: kernel -> results of a dense model."""
    torch.set_num_threads(1)
    platform = model_section.start_process_groups("cpu")
    source, batches = Path(folder) / "dense", model_section.make_batches()
    model_class = type(small_models.write_model(source, model_section.MODELS["dense"][1], 0))

    def outputs(dtype: torch.dtype) -> list[Any]:
        return [model_section._expected(model_class, source, dtype, platform.device, each.samples) for each in batches]

    exact, rounded = outputs(torch.float32), outputs(torch.bfloat16)

    def results(attention: Any, dtype: torch.dtype = torch.float32) -> list[CheckResult]:
        cases = list(zip(batches, exact, exact if dtype is torch.float32 else rounded, strict=True))
        options = ComputeOptions(attention=attention)
        return list(model_section._check_variant(source, "dense", dtype, options, platform, cases))

    found = {"sdpa": results("sdpa"), "sdpa, bfloat16": results("sdpa", torch.bfloat16)}
    for aligned in ("last", "first"):
        with mock.patch("torch.nn.attention.varlen.varlen_attn", partial(varlen_attn, aligned=aligned)):
            found[f"varlen, {aligned}"] = results("varlen")
    (Path(folder) / "found.json").write_text(
        json.dumps({name: [each.to_json() for each in each_found] for name, each_found in found.items()})
    )


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
