"""Process groups of the trainer: Megatron's, over the control plane's store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import PrefixStore, TCPStore

from megatron_webrl.config import Config
from megatron_webrl.model import platform as platforms

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
    limit = config.trainer.batch_seconds + config.weights.seconds + config.run.start_seconds
    torch.distributed.init_process_group(
        platform.backend,
        store=PrefixStore(f"trainer/{incarnation}", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=limit),
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.trainer.tensor_parallel)
    model_parallel_cuda_manual_seed(config.run.seed)
    return platform


def shutdown() -> None:
    """Leave all process groups."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def broadcast_object(value: Value) -> Value:
    """The first rank's value, on every rank."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
