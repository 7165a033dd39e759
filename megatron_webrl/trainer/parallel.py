"""Process groups of the trainer: Megatron's, over the control plane's store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from megatron.core import parallel_state
from torch.distributed import PrefixStore, TCPStore

from megatron_webrl.config import Config
from megatron_webrl.model import groups
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.layout import Sizes

Value = TypeVar("Value")


@dataclass(frozen=True)
class Rank:
    """Place of this process among the trainer's, from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Rank:
        """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them, or their Slurm counterparts. Raises KeyError."""
        if "RANK" in os.environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        else:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        rank, world_size, local_rank = (int(os.environ[name]) for name in names)
        return cls(rank, world_size, local_rank)


def initialize(config: Config, rank: Rank, store: TCPStore, incarnation: str) -> platforms.Platform:
    """Switch the platform on and form Megatron's process groups. Collective over all trainer ranks.

    Every collective ends with an error after trainer.batch_seconds and weights.seconds together, the longest
    time that the other ranks may wait for the first one.
    """
    platform = platforms.use(config.model.platform)
    torch.distributed.init_process_group(
        platform.backend,
        store=PrefixStore(f"trainer/{incarnation}", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=collective_seconds(config)),
    )
    groups.form(sizes(config), config.run.seed)
    return platform


def collective_seconds(config: Config) -> float:
    """Limit of a collective: the longest time that other ranks may wait for the first one."""
    return config.trainer.batch_seconds + config.weights.seconds + config.run.start_seconds


def sizes(config: Config) -> Sizes:
    """How many ways the configuration splits the model."""
    trainer = config.trainer
    return Sizes(
        tensor=trainer.tensor_parallel,
        pipeline=trainer.pipeline_parallel,
        virtual=trainer.virtual_pipeline,
        expert=trainer.expert_parallel,
        expert_tensor=trainer.expert_tensor_parallel,
        context=trainer.context_parallel,
    )


def shutdown() -> None:
    """Leave all process groups."""
    groups.dissolve()
    torch.distributed.destroy_process_group()


def broadcast_object(value: Value) -> Value:
    """The first rank's value, on every rank."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def largest(value: float, device: torch.device) -> float:
    """The largest value of all ranks, on every rank. Collective; `device` is the platform's."""
    tensor = torch.tensor(value, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return float(tensor)


def from_last_stage(value: Value) -> Value:
    """The value of this rank's peer on the last pipeline stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(
        box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group
    )
    return box[0]
