"""How far the engine's log-probabilities are from the trainer's, for tokens made under the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.model.groups import last_stage
from megatron_webrl.trainer.parallel import from_last_stage
from megatron_webrl.trainer.rows import Microbatch


@dataclass(frozen=True)
class Gap:
    """Over the tokens of a batch that the version being updated produced."""

    largest: float | None  # max |engine - trainer|; None without such tokens
    tokens: int


def largest_gap(rows: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int) -> Gap:
    """Compare `logprobs` (per row, float32 [tokens], at `version`) with the engine's. Collective over all ranks.

    Only the last pipeline stage has log-probabilities; every rank gets its answer.
    """
    return from_last_stage(_gap(rows, logprobs, version) if last_stage() else Gap(None, 0))


def _gap(rows: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int) -> Gap:
    largest, count = 0.0, 0
    for row, scores in zip(rows, logprobs, strict=True):
        # A row without weight stands in for an empty share and repeats another rank's tokens.
        same = (row.versions == version) & (row.weight > 0)
        if same.any():
            largest = max(largest, float((scores - row.behaviour)[same].abs().max()))
            count += int(same.sum())
    device = rows[0].row.tokens.device
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    peak, total = torch.tensor(largest, device=device), torch.tensor(float(count), device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX, group=group)
    torch.distributed.all_reduce(total, group=group)
    return Gap(float(peak) if total else None, int(total))
