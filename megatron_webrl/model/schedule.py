"""Run rows through the model: Megatron's schedules, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.model.qwen3_vl.packed_input import PackedInput

MicrobatchResults = dict[str, Tensor]
LossFunction = Callable[[int, Tensor], tuple[Tensor, MicrobatchResults]]


def forward_backward(
    chunks: Sequence[Any], inputs: Sequence[PackedInput], loss_fn: LossFunction, *, forward_only: bool
) -> list[MicrobatchResults]:
    """Forward and, unless `forward_only`, backward over all rows. Collective over the model's ranks.

    `chunks`: this rank's model chunks, Qwen3VL or DistributedDataParallel around it. `loss_of(index, logits)` is
    called on the last pipeline stage for each row, logits [R, padded vocabulary / tensor-parallel size]; it gives the
    loss (Megatron averages it over rows) and what to return. Every stage must bring all rows; pixels are read by the
    first only. Returns the results per row on the last stage, an empty list on the others.
    """

    def forward(iterator: Iterator[tuple[int, PackedInput]], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        index, row = next(iterator)
        return chunk(row), partial(loss_fn, index)

    iterators = [iter(list(enumerate(inputs))) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(inputs),
        # Stages tell each other the size of every row; Megatron wants a number all the same.
        seq_length=max(row.tokens.numel() for row in inputs),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results if is_last_stage() else []
