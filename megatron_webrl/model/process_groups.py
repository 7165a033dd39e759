"""Create Megatron's process groups from ParallelSizes, and read sizes and coordinates back."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_webrl.model.layout import ParallelSizes, RankCoordinates, check_rank_count

TIMEOUT_SECONDS = 1800.0  # Megatron's default


def init_process_groups(sizes: ParallelSizes, seed: int = 0, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Create all groups and seed Megatron's random states. Collective; torch.distributed must be initialised.

    The remaining factor of the ranks is data parallel. A collective on the groups raises after `timeout_seconds`.
    Raises ValueError if the sizes do not divide the ranks.
    """
    check_rank_count(sizes, torch.distributed.get_world_size())
    if sizes.virtual > 1 and sizes.pipeline == 1:
        raise ValueError(f"virtual pipeline size {sizes.virtual} needs a pipeline of at least 2 stages")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        distributed_timeout_minutes=timeout_seconds / 60,
    )
    model_parallel_cuda_manual_seed(seed)


def destroy_process_groups() -> None:
    parallel_state.destroy_model_parallel()


def parallel_sizes_of(groups: ProcessGroupCollection) -> ParallelSizes:
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return ParallelSizes(
        tensor=get_pg_size(groups.tp),
        pipeline=get_pg_size(groups.pp),
        virtual=virtual,
        expert=get_pg_size(groups.ep),
        expert_tensor=get_pg_size(groups.expt_tp),
        context=get_pg_size(groups.cp),
    )


def rank_coordinates_of(groups: ProcessGroupCollection) -> RankCoordinates:
    return RankCoordinates(
        get_pg_rank(groups.tp), get_pg_rank(groups.pp), get_pg_rank(groups.ep), get_pg_rank(groups.expt_tp)
    )


def is_last_stage() -> bool:
    """Whether this rank holds the output layer."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)
