"""The processes that a node starts: command, environment, cores and log of each."""

from __future__ import annotations

import logging
import math
import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.placement import DEVICES_VARIABLE, Placement, ProcessPlacement, RoleName, visible_devices

log = logging.getLogger(__name__)

CORES_VARIABLE = "WEBRL_CORES"
CACHE_VARIABLES = {  # subfolder by variable; the defaults lie in the home folder, which nodes share, or in TMPDIR
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one setting


@dataclass(frozen=True)
class ProcessSpec:
    """What a node starts."""

    name: str
    role: str
    command: tuple[str, ...]
    environment: dict[str, str]  # added to that of the node
    cores: tuple[int, ...]  # empty: any
    log: Path

    def shell_command(self) -> str:
        """The command with its environment, in shell syntax."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])


def webrl_command(arguments: Sequence[str]) -> list[str]:
    """The `webrl` command, run by this Python."""
    return [sys.executable, "-m", "megatron_webrl", *arguments]


def role_command(run_folder: Path, name: str, *options: str) -> list[str]:
    """The command of a role, which reads all else from the run's folder."""
    return webrl_command(["role", str(run_folder), name, *options])


def process_specs(
    config: Config,
    placement: Placement,
    node: int,
    roles: Collection[RoleName],
    first_host: str = "",
    inherited: Mapping[str, str] | None = None,
    stub_command: str = "",
) -> list[ProcessSpec]:
    """The processes of some roles on a node. Raises ConfigError.

    `first_host`: of the first node; empty for a job on this machine only, whose processes are bound to no cores and
    choose their ports. `inherited`: the node's environment, by default this process's. `stub_command` replaces `webrl`.
    """
    inherited = os.environ if inherited is None else inherited
    program = shlex.split(stub_command) or webrl_command(())
    logs = log_folder(config, node if first_host else None)
    return [
        ProcessSpec(
            process.name,
            process.role,
            (*program, "role", str(config.run_folder), process.name),
            _environment(config, placement, process, first_host, inherited),
            process.cores if first_host else (),
            logs / f"{process.name}.log",
        )
        for process in placement.on_node(node)
        if process.role in roles
    ]


def log_folder(config: Config, node: int | None) -> Path:
    """The folder of a node's logs; None: of a job on this machine only."""
    return config.run_folder / "logs" / ("" if node is None else f"node-{node}")


def _environment(
    config: Config, placement: Placement, process: ProcessPlacement, first_host: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    environment = {}
    if process.role == "trainer":
        environment = _rank_environment(process, config, inherited)
    if process.devices:
        allocated = inherited.get(DEVICES_VARIABLE, "")
        environment[DEVICES_VARIABLE] = visible_devices(process.devices, allocated, config.cluster.gpus_per_node)
    if not first_host:
        return environment
    # MASTER_PORT is a port of the placement, so that no two process groups of the job meet at the same one.
    if process.role == "trainer":
        first = next(each for each in placement.processes if each.role == "trainer" and each.index == 0)
        environment |= {"MASTER_ADDR": first_host, "MASTER_PORT": str(first.port)}
    else:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.port)}
    if process.cores:
        environment[CORES_VARIABLE] = format_cores(process.cores)
    if config.cluster.nics and "NCCL_IB_HCA" not in inherited:
        # All cards of the node for every process: NCCL needs equal lists, and gives each GPU the nearest card.
        environment["NCCL_IB_HCA"] = "=" + ",".join(dict.fromkeys(config.cluster.nics))
    return environment


def _rank_environment(process: ProcessPlacement, config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK of a trainer rank, and variables that the inherited environment does not set.

    Those are one OpenMP thread; 32 hardware queues of the GPU, since a rank has a communicator for each engine that it
    sends to, and work on one would wait for unrelated work on another in the same queue; and the limit for creating
    such a communicator, weights.timeout_seconds, which torch reads only once in a process.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(config.weights.timeout_seconds)),
    }
    numbers = {"RANK": process.index, "WORLD_SIZE": config.trainer_world_size, "LOCAL_RANK": process.local_rank}
    variables = {name: str(number) for name, number in numbers.items()}
    return variables | {name: value for name, value in defaults.items() if name not in inherited}


def role_environment(config: Config, role: str, scratch: Path) -> dict[str, str]:
    """This process's environment with `scratch` as TMPDIR and the variables of `gpu_environment`, for a `role`."""
    return {**os.environ, **gpu_environment(config, role, os.environ), "TMPDIR": str(scratch)}


def gpu_environment(config: Config, role: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to those of a trainer rank or a rollout process on a machine with GPUs: memory allocator, and
    caches of compiled kernels on a local disk. Inherited ones are kept. Makes the folders.
    """
    if role not in ("trainer", "rollout") or not (config.cluster.gpus_per_node or config.model.platform == "cuda"):
        return {}
    variables = {}
    if role == "trainer" and not any(name in inherited for name in ALLOCATOR_VARIABLES):
        # Packed sequences differ in size: fixed segments fragment. Not for engines: vLLM 0.32 turns expandable segments
        # off around its own allocator (sleep mode) and refuses them with a KV connector, and it allocates once.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    missing = [name for name in CACHE_VARIABLES if name not in inherited]
    folder = make_cache_folder(Path(inherited.get("TMPDIR") or tempfile.gettempdir())) if missing else None
    if folder is not None:
        variables |= {name: str(folder / CACHE_VARIABLES[name]) for name in missing}
    return variables


def make_cache_folder(parent: Path) -> Path | None:
    """Make webrl-cache-UID in a local folder, which later runs use again; None if only this user could not write there.

    Compiled kernels are loaded as code, so a folder that another user made or may write to is not used.
    """
    folder = parent / f"webrl-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        log.warning("%s: %s; compiled kernels are cached in the home folder", folder, error.strerror)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        log.warning("%s belongs to another user, or others may write to it; it is not used as a cache", folder)
        return None
    return folder
