"""Run micro-batches through the model with Megatron's schedules, pipelined or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.model.vision_language.packed_input import PackedInput

MicrobatchResults = dict[str, Tensor]
LossFunction = Callable[[int, Any], tuple[Tensor, MicrobatchResults]]


def forward_backward(
    chunks: Sequence[Any], inputs: Sequence[PackedInput], loss_fn: LossFunction, *, forward_only: bool
) -> list[MicrobatchResults]:
    """Forward and, unless `forward_only`, backward over all inputs. Collective over the model's ranks.

    `chunks`: this rank's parts of a VisionLanguageModel, possibly in DistributedDataParallel. The last pipeline stage
    calls `loss_fn(index, output)` for each input, with the output of its forward pass; it returns the loss (Megatron
    averages it over the inputs) and the results. Every stage passes all inputs; only the first reads pixels.
    Returns the results per input on the last stage, an empty list on the others.
    """

    def forward(iterator: Iterator[tuple[int, PackedInput]], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        index, packed = next(iterator)
        return chunk(packed), partial(loss_fn, index)

    iterators = [iter(list(enumerate(inputs))) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(inputs),
        seq_length=max(packed.tokens.numel() for packed in inputs),  # required, though stages send lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results if is_last_stage() else []
