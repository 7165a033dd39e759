"""Float32 logits of an output layer whose weights and inputs are bfloat16 (model.head_dtype=float32)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_webrl.model.gradients import add_product


def float32_logits(layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None) -> Tensor:
    """This rank's logits, float32 [R, padded vocabulary / tensor-parallel size], of bfloat16 hidden states [R, hidden].

    `weight`: a tied embedding, in place of the layer's own. Products are accumulated and returned in float32, without
    the rounding of logits to 8 bits of mantissa (ScaleRL, arXiv 2510.13786); vLLM's engine does the same. The gradient
    of the logits is rounded to bfloat16 for the two products of the backward pass, as that of every other layer.
    The backward pass is collective over the tensor-parallel ranks.
    """
    hidden = copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)
    return _Float32Product.apply(hidden, layer.weight if weight is None else weight, layer.gradient_accumulation_fusion)


class _Float32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, accumulates: bool) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.accumulates = accumulates
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()  # on the CPU PyTorch has no product of bfloat16 in float32

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)
        of_hidden = gradient @ weight
        if not ctx.accumulates:
            return of_hidden, gradient.t() @ hidden, None
        add_product(hidden, gradient, weight.main_grad)
        weight.grad_added_to_main_grad = True  # DistributedDataParallel needs a gradient, and then ignores it
        return of_hidden, torch.empty_like(weight), None
