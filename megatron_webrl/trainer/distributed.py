"""Wrap the model chunks of a rank in Megatron's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_webrl.model import gradients
from megatron_webrl.model.vision_language.model import VisionLanguageModel


def wrap_ddp(chunks: Sequence[VisionLanguageModel]) -> list[DistributedDataParallel]:
    """Give the chunks contiguous float32 gradient buffers, to which products add, averaged over data-parallel ranks.

    The reduction runs after the last backward pass: a micro-batch without images gives the vision tower no gradient, so
    no rank knows earlier that its own are complete. The distributed optimiser needs shards even with one replica.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    wrapped = []
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = gradients.finalize_gradients
        gradients.accumulate_in_products(chunk)
        wrapped.append(DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk))
        wrapped[-1].broadcast_params()
    return wrapped
