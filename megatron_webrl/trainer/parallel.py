"""The trainer's process groups, formed over the control plane's store, and small collectives on them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from torch.distributed import PrefixStore, TCPStore

from megatron_webrl.cluster.rank_info import RankInfo
from megatron_webrl.config.schema import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.model import process_groups
from megatron_webrl.model.layout import ParallelSizes

Value = TypeVar("Value")


def initialize(config: Config, rank: RankInfo, store: TCPStore, store_prefix: str) -> platforms.Platform:
    """Activate the platform, form process groups; collectives raise after collective_timeout_seconds. Collective."""
    platform = platforms.activate(config.model.platform)
    torch.distributed.init_process_group(
        platform.backend,
        store=PrefixStore(f"trainer/{store_prefix}", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=collective_timeout_seconds(config)),
    )
    process_groups.init_process_groups(parallel_sizes(config), config.run.seed)
    return platform


def collective_timeout_seconds(config: Config) -> float:
    """Limit of a collective: the longest time that other ranks may wait for the first one."""
    return config.trainer.batch_timeout_seconds + config.weights.timeout_seconds + config.run.startup_timeout_seconds


def parallel_sizes(config: Config) -> ParallelSizes:
    """The sizes of the model-parallel groups that the configuration names."""
    trainer = config.trainer
    return ParallelSizes(
        tensor=trainer.tensor_parallel,
        pipeline=trainer.pipeline_parallel,
        virtual=trainer.virtual_pipeline,
        expert=trainer.expert_parallel,
        expert_tensor=trainer.expert_tensor_parallel,
        context=trainer.context_parallel,
    )


def shutdown() -> None:
    """Destroy all process groups."""
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def broadcast_object(value: Value) -> Value:
    """The first rank's value, on every rank."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(value: Value) -> list[Value]:
    """The values of all ranks in rank order, on every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def all_reduce_max(value: float, device: torch.device) -> float:
    """The largest value of all ranks, on every rank. `device` is the platform's."""
    tensor = torch.tensor(value, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return float(tensor)


def broadcast_from_last_stage(value: Value) -> Value:
    """The value of the rank on the last stage of this rank's pipeline."""
    pipe = parallel_state.get_pipeline_model_parallel_group()
    if pipe.size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=pipe)
    return box[0]
