"""Gradients of weights: added to the float32 buffers in the products, and reduced after the last micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_pg_size
from torch import Tensor


def accumulate_in_products(model: Any) -> None:
    """Let the products for weight gradients add to `main_grad`; else each gradient is written, read and added.

    `model`: its parameters must get buffers from DistributedDataParallel. Megatron's linear layers ask for a module of
    Apex, for which PyTorch's product stands in; Transformer Engine has its own. A head that is tied to the embedding
    stays as it was: its weight has a second gradient, which DistributedDataParallel would not add.
    """
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    head = model.output_layer if model.post_process and model.share_embeddings_and_output_weights else None
    for module in model.modules():
        if isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)) and module is not head:
            module.gradient_accumulation_fusion = True
        elif hasattr(module, "fuse_wgrad_accumulation"):  # of Transformer Engine
            module.fuse_wgrad_accumulation = True


def add_product(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight to `total`, float32 [out, in]; inputs [T, in], gradient of outputs [T, out]."""
    if inputs.dtype is total.dtype:
        total.addmm_(gradient.t(), inputs)
    elif inputs.is_cuda:
        torch.addmm(total, gradient.t(), inputs, out_dtype=total.dtype, out=total)
    else:  # on the CPU PyTorch has no product of bfloat16 in float32
        total.add_(gradient.t() @ inputs)


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
