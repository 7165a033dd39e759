"""The step critic's part of an update: values of all ranks give each step its advantage and its value target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.config.schema import Config
from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.trainer.credit.step_critic import StepCredit, StepId, critic_credit
from megatron_webrl.trainer.data.sequence_packer import Microbatch
from megatron_webrl.trainer.parallel import broadcast_from_last_stage
from megatron_webrl.types import Group

Minibatches = list[list[Microbatch]]


def assign_credit(
    minibatches: Minibatches, values: Sequence[Sequence[Tensor]], groups: Sequence[Group], config: Config
) -> tuple[Minibatches, dict[str, float]]:
    """Micro-batches with the advantages and value targets of `critic_credit`, and its metrics. Collective.

    `values`: of the policy at the start of the update, float32 [values] per micro-batch, on the last pipeline stage.
    """
    microbatches = [each for part in minibatches for each in part]
    found = gather_values(microbatches, [each for part in values for each in part])
    credit = critic_credit(groups, found, config)
    return [[_with_credit(each, credit) for each in part] for part in minibatches], credit.metrics


def gather_values(microbatches: Sequence[Microbatch], values: Sequence[Tensor]) -> dict[StepId, float]:
    """The value of each step of all replicas, on every rank. Padding micro-batches count nothing. Collective."""
    found: dict[StepId, float] = {}
    if is_last_stage():
        columns = [
            (batch.step_index[batch.inputs.value_rows], of_batch, batch.value_weight)
            for batch, of_batch in zip(microbatches, values, strict=True)
        ]
        # One read for all micro-batches: the host waits for the device. float64 holds indices and float32 exactly.
        rows = torch.cat([torch.stack([column.double() for column in each], dim=1) for each in columns]).cpu()
        local: dict[StepId, float] = {}
        for batch, part in zip(microbatches, rows.split([len(of_batch) for of_batch in values]), strict=True):
            local |= {batch.step_ids[int(place)]: value for place, value, weight in part.tolist() if weight}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        parts: list[dict[StepId, float]] = [{} for _ in range(group.size())]
        torch.distributed.all_gather_object(parts, local, group=group)
        found = {step: value for part in parts for step, value in part.items()}
    return broadcast_from_last_stage(found)


def _with_credit(batch: Microbatch, credit: StepCredit) -> Microbatch:
    def of_steps(numbers: dict[StepId, float]) -> Tensor:
        found = torch.tensor([numbers[step] for step in batch.step_ids], dtype=torch.float32)
        return copy_to_device(found, batch.step_index.device)

    return replace(
        batch,
        advantage=of_steps(credit.advantages)[batch.step_index],
        value_targets=of_steps(credit.targets)[batch.step_index[batch.inputs.value_rows]],
    )
