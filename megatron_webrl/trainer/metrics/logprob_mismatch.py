"""Difference between the engine's and the trainer's log-probabilities of tokens sampled under the same weights."""

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
    """Mismatch over the tokens of a batch that the version being updated produced."""

    largest: float | None  # max |engine - trainer|; None without such tokens
    tokens: int


def measure_logprob_mismatch(
    microbatches: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int
) -> LogprobMismatch:
    """Compare `logprobs` (float32 [tokens] per micro-batch, at `version`) with the engine's. Collective over all ranks.

    Only the last pipeline stage has log-probabilities; every rank gets the result.
    """
    if is_last_stage():
        return broadcast_from_last_stage(_measure(microbatches, logprobs, version))
    return broadcast_from_last_stage(LogprobMismatch(None, 0))


def _measure(microbatches: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int) -> LogprobMismatch:
    largest, count = 0.0, 0
    for batch, trainer_logprobs in zip(microbatches, logprobs, strict=True):
        # A micro-batch of weight 0 is padding: it repeats another rank's tokens on a rank without samples.
        same = (batch.versions == version) & (batch.weight > 0)
        if same.any():
            largest = max(largest, float((trainer_logprobs - batch.behaviour_logprobs)[same].abs().max()))
            count += int(same.sum())
    device = microbatches[0].inputs.tokens.device
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    peak, total = torch.tensor(largest, device=device), torch.tensor(float(count), device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX, group=group)
    torch.distributed.all_reduce(total, group=group)
    return LogprobMismatch(float(peak) if total else None, int(total))
