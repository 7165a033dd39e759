"""The place of a process among the trainer's processes."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process among the trainer's processes, from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> RankInfo:
        """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them, or their Slurm counterparts. Raises KeyError."""
        if "RANK" in os.environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        else:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        rank, world_size, local_rank = (int(os.environ[name]) for name in names)
        return cls(rank, world_size, local_rank)
