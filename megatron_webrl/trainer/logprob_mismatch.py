"""How far the engine's log-probabilities are from the trainer's, for tokens made under the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.trainer.data.sequence_packer import Microbatch
from megatron_webrl.trainer.parallel import broadcast_from_last_stage


@dataclass(frozen=True)
class LogprobMismatch:
    """Over the tokens of a batch that the version being updated produced."""

    largest: float | None  # max |engine - trainer|; None without such tokens
    tokens: int


def measure_logprob_mismatch(rows: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int) -> LogprobMismatch:
    """Compare `logprobs` (per row, float32 [tokens], at `version`) with the engine's. Collective over all ranks.

    Only the last pipeline stage has log-probabilities; every rank gets its answer.
    """
    return broadcast_from_last_stage(_gap(rows, logprobs, version) if is_last_stage() else LogprobMismatch(None, 0))


def _gap(rows: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int) -> LogprobMismatch:
    largest, count = 0.0, 0
    for row, scores in zip(rows, logprobs, strict=True):
        # A row without weight stands in for an empty share and repeats another rank's tokens.
        same = (row.versions == version) & (row.weight > 0)
        if same.any():
            largest = max(largest, float((scores - row.behaviour_logprobs)[same].abs().max()))
            count += int(same.sum())
    device = rows[0].inputs.tokens.device
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    peak, total = torch.tensor(largest, device=device), torch.tensor(float(count), device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX, group=group)
    torch.distributed.all_reduce(total, group=group)
    return LogprobMismatch(float(peak) if total else None, int(total))
