"""Gradient reductions after the backward pass of the last micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_pg_size


def finalize_gradients(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
    """Complete the gradients of all model chunks (DistributedDataParallel). Collective over all ranks.

    Sums those of the vision tower over tensor-parallel ranks, which encode different images; Megatron does the rest.
    """
    for chunk in chunks:
        _sum_over_tensor_parallel_ranks(chunk.module)
    finalize_model_grads(chunks, *args, **kwargs)


def _sum_over_tensor_parallel_ranks(model: Any) -> None:
    group = model.pg_collection.tp
    if not model.pre_process or get_pg_size(group) == 1:
        return
    gradients = [p.main_grad for p in model.visual.parameters() if p.requires_grad]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
