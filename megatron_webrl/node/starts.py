"""What a node starts: command line, environment, cores and log of each of its processes. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl import roles
from megatron_webrl.config import Config, ConfigError
from megatron_webrl.placement import Placement, Process, Role
from megatron_webrl.placement_cores import format_cores

CORES = "WEBRL_CORES"
DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Start:
    """One process of a node, before it is started."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]  # beside what the node's own process was given
    cores: tuple[int, ...]  # empty: any
    log: Path

    def shown(self) -> str:
        """The command with its environment, as a shell would take it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*words, shlex.join(self.command)])


def starts(
    config: Config, placement: Placement, node: int, role: Role, address: str, given: Mapping[str, str], rehearse: str
) -> list[Start]:
    """The processes of a role on a node.

    `address`: the control plane's HOST:PORT. `given`: the environment of the process that starts them. `rehearse`: a
    command that takes the place of `webrl` in each of them; empty: none does. Raises ConfigError.
    """
    return [
        Start(
            process.name,
            (*(shlex.split(rehearse) or roles.webrl(())), *_arguments(config, process, address)),
            _environment(config, placement, process, address, given),
            process.cores,
            log_folder(config, node) / f"{process.name}.log",
        )
        for process in placement.on(node)
        if process.role == role
    ]


def log_folder(config: Config, node: int) -> Path:
    """Where the logs of a node's processes are."""
    return config.run_folder / "logs" / f"node-{node}"


def _arguments(config: Config, process: Process, address: str) -> list[str]:
    arguments = [process.role, *roles.where(config, address)]
    if process.role == "rollout":
        arguments += ["--worker", str(process.number)]
        arguments += ["--part", str(process.part)] if process.part else []
    return arguments if config.cluster.nodes == 1 else [*arguments, "--node", str(process.node)]


def _environment(
    config: Config, placement: Placement, process: Process, address: str, given: Mapping[str, str]
) -> dict[str, str]:
    # Whatever meets by MASTER_ADDR and MASTER_PORT does so at a port that no other process of the job has.
    first = next(each for each in placement.processes if each.role == "trainer" and each.number == 0)
    if process.role == "trainer":
        environment = roles.rank_environment(process.number, config.trainer_ranks, process.local, given)
        environment |= {"MASTER_ADDR": address.rpartition(":")[0], "MASTER_PORT": str(first.port)}
    else:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.port)}
    if process.devices:
        environment[DEVICES] = visible(process.devices, given.get(DEVICES, ""), config.cluster.gpus)
    if process.cores:
        environment[CORES] = format_cores(process.cores)
    if process.nics and "NCCL_IB_HCA" not in given:
        environment["NCCL_IB_HCA"] = "=" + ",".join(process.nics)
    return environment


def visible(devices: Sequence[int], given: str, gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES of some of a node's GPUs, counted among those that the job was `given`; empty: all.

    Raises ConfigError for fewer than `gpus`.
    """
    have = given.split(",") if given else [str(number) for number in range(gpus)]
    if len(have) < gpus:
        raise ConfigError(
            f"cluster.gpus={gpus}, but Slurm gave this node {len(have)} ({DEVICES}={given}); ask for more with "
            "--gpus-per-node, or lower cluster.gpus"
        )
    return ",".join(have[device] for device in devices)
