"""The trainer's process groups, formed over a store of their own, and small collectives on them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from torch.distributed import TCPStore

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.group_store import connect_group_store, host_group_store
from megatron_webrl.model import platform as platforms
from megatron_webrl.model import process_groups
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.placement.placement import RankInfo, gpu_memory_share

Value = TypeVar("Value")


def initialize(config: Config, rank: RankInfo, control: ControlClient, attempt: str) -> platforms.Platform:
    """Activate the platform, form process groups; collectives raise after collective_timeout_seconds. Collective.

    `attempt` names this start of the trainer among all of the job: each has a store of its own, so that no key of a
    failed attempt reaches the next. Raises JobFailed if rank 0 hosts none within run.startup_timeout_seconds.
    """
    platform = platforms.activate(config.model.platform)
    if config.cluster.colocate:
        platforms.limit_memory(platform, gpu_memory_share(config, "trainer"))
    seconds = collective_timeout_seconds(config)
    torch.distributed.init_process_group(
        platform.backend,
        store=_attempt_store(config, rank, control, attempt),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=seconds),
    )
    process_groups.init_process_groups(parallel_sizes(config), config.run.seed, seconds)
    return platform


def _attempt_store(config: Config, rank: RankInfo, control: ControlClient, attempt: str) -> TCPStore:
    """The store of this attempt's process groups, hosted by rank 0 until it destroys them."""
    key, seconds = f"trainer/{attempt}/store", collective_timeout_seconds(config)
    if rank.rank == 0:
        store, address = host_group_store(control.host, control.port, seconds)
        control.put_json(key, address)
        return store
    address = control.wait_for_key(
        key, config.run.startup_timeout_seconds, "the store of trainer-0 (run.startup_timeout_seconds)"
    )
    return connect_group_store(address, seconds)


def collective_timeout_seconds(config: Config) -> float:
    """Limit of a collective: the longest time that other ranks may wait for the first one."""
    groups, weights = config.rollout.episode_timeout_seconds, config.weights.timeout_seconds
    return groups + weights + config.run.startup_timeout_seconds


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


def image_rank() -> int | None:
    """This rank among those that divide the images of its replica; None: it has no vision tower."""
    if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        return None
    return int(parallel_state.get_tensor_and_context_parallel_group().rank())


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
