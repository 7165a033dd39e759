"""Whether the limits of this process (ulimit) are high enough for the roles that it starts."""

from __future__ import annotations

import resource
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.placement.placement import Placement
from megatron_webrl.util.child_process import MAX_OPEN_FILES

INFINIBAND_DEVICES = Path("/sys/class/infiniband")
LOCKED_MEMORY_GIB = 4  # of one process: NCCL registers buffers of some MiB for each channel and peer
FILES_PER_PROCESS = 8  # connections to each process of the job: control service, and gloo groups of all ranks
FILES_PER_EPISODE = 16  # pages, sockets and screenshots of an episode in its worker and browser server
OTHER_FILES = 1024  # libraries, logs, shared memory, caches

_GIB = 2**30


def needed_open_files(config: Config, placement: Placement) -> int:
    """Upper bound of the open files of any process of the job."""
    episodes = config.rollout.groups_in_flight * config.rollout.group_size  # of a worker
    return OTHER_FILES + FILES_PER_PROCESS * len(placement.processes) + FILES_PER_EPISODE * episodes


def open_files_problem(needed: int) -> str:
    """Why the limit of open files is too low; empty if it is not. Roles raise the soft limit (child_process.py)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= min(needed, MAX_OPEN_FILES):
        return ""
    return (
        f"a process may open {hard} files (ulimit -Hn), but one of this job may need {needed}; raise LimitNOFILE of "
        "slurmd, or the limit of the shell that submits the job (PropagateResourceLimits of slurm.conf)"
    )


def locked_memory_problem(devices: Path = INFINIBAND_DEVICES) -> str:
    """Why the limit of locked memory is too low for the network cards in `devices`; empty if it is not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not cards or soft == resource.RLIM_INFINITY or soft >= LOCKED_MEMORY_GIB * _GIB:
        return ""
    return (
        f"a process may lock {soft // 1024} KiB of memory (ulimit -l), but InfiniBand ({', '.join(cards[:3])}"
        f"{', ...' if len(cards) > 3 else ''}) needs unlimited, or at least {LOCKED_MEMORY_GIB} GiB; set "
        "LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    )
