"""Process of the prefix tree tests: what the section "one GPU" finds on the CPU, with a kernel of each alignment."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_webrl.checks import gpu_model, oracles
from megatron_webrl.checks.report import CheckResult
from megatron_webrl.model.compute_options import ComputeOptions


def run(rank: int, folder: str) -> None:
    """Write found.json: kernel -> results of a dense model."""
    torch.set_num_threads(1)
    platform = gpu_model.start_process_groups("cpu")
    source, batches = Path(folder) / "dense", gpu_model.make_batches()
    model_class = type(oracles.write_model(source, gpu_model.MODELS["dense"], 0))
    dense = gpu_model.Variant(source, "dense", torch.float32, platform)

    def outputs(dtype: torch.dtype) -> list[Any]:
        return [gpu_model._expected(model_class, replace(dense, dtype=dtype), each.samples) for each in batches]

    exact, rounded = outputs(torch.float32), outputs(torch.bfloat16)

    def results(attention: Any, dtype: torch.dtype = torch.float32) -> list[CheckResult]:
        cases = list(zip(batches, exact, exact if dtype is torch.float32 else rounded, strict=True))
        variant = replace(dense, dtype=dtype, options=ComputeOptions(attention=attention))
        return list(gpu_model._check_variant(variant, cases))

    found = {"sdpa": results("sdpa"), "sdpa, bfloat16": results("sdpa", torch.bfloat16)}
    for aligned in ("last", "first"):
        with mock.patch("torch.nn.attention.varlen.varlen_attn", partial(varlen_attn, aligned=aligned)):
            found[f"varlen, {aligned}"] = results("varlen")
    (Path(folder) / "found.json").write_text(
        json.dumps(
            {name: [asdict(each) | {"ratio": each.ratio} for each in each_found] for name, each_found in found.items()}
        )
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
