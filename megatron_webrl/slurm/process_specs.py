"""What a node starts: command line, environment, cores and log of each of its processes. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.cluster.cores import format_cores
from megatron_webrl.cluster.placement import Placement, ProcessPlacement, RoleName
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch import role_process

CORES_VARIABLE = "WEBRL_CORES"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a node, before it is started."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]  # beside what the node's own process was given
    cores: tuple[int, ...]  # empty: any
    log: Path

    def shell_command(self) -> str:
        """The command with its environment, as a shell would take it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*words, shlex.join(self.command)])


def process_specs(
    config: Config,
    placement: Placement,
    node: int,
    role: RoleName,
    address: str,
    given: Mapping[str, str],
    stub_command: str,
) -> list[ProcessSpec]:
    """The processes of a role on a node.

    `address`: the control plane's HOST:PORT. `given`: the environment of the process that starts them. `rehearse`: a
    command that takes the place of `webrl` in each of them; empty: none does. Raises ConfigError.
    """
    return [
        ProcessSpec(
            process.name,
            (*(shlex.split(stub_command) or role_process.webrl_command(())), *_arguments(config, process, address)),
            _environment(config, placement, process, address, given),
            process.cores,
            log_folder(config, node) / f"{process.name}.log",
        )
        for process in placement.on_node(node)
        if process.role == role
    ]


def log_folder(config: Config, node: int) -> Path:
    """Where the logs of a node's processes are."""
    return config.run_folder / "logs" / f"node-{node}"


def _arguments(config: Config, process: ProcessPlacement, address: str) -> list[str]:
    arguments = [process.role, *role_process.role_arguments(config, address)]
    if process.role == "rollout":
        arguments += ["--worker", str(process.index)]
        arguments += ["--follower", str(process.follower)] if process.follower else []
    return arguments if config.cluster.nodes == 1 else [*arguments, "--node", str(process.node)]


def _environment(
    config: Config, placement: Placement, process: ProcessPlacement, address: str, given: Mapping[str, str]
) -> dict[str, str]:
    # Whatever meets by MASTER_ADDR and MASTER_PORT does so at a port that no other process of the job has.
    first = next(each for each in placement.processes if each.role == "trainer" and each.index == 0)
    if process.role == "trainer":
        environment = role_process.rank_environment(process.index, config.trainer_world_size, process.local_rank, given)
        environment |= {"MASTER_ADDR": address.rpartition(":")[0], "MASTER_PORT": str(first.port)}
    else:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.port)}
    if process.devices:
        environment[DEVICES_VARIABLE] = cuda_visible_devices(
            process.devices, given.get(DEVICES_VARIABLE, ""), config.cluster.gpus_per_node
        )
    if process.cores:
        environment[CORES_VARIABLE] = format_cores(process.cores)
    if process.nics and "NCCL_IB_HCA" not in given:
        environment["NCCL_IB_HCA"] = "=" + ",".join(process.nics)
    return environment


def cuda_visible_devices(devices: Sequence[int], given: str, gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES of some of a node's GPUs, counted among those that the job was `given`; empty: all.

    Raises ConfigError for fewer than `gpus`.
    """
    have = given.split(",") if given else [str(number) for number in range(gpus)]
    if len(have) < gpus:
        raise ConfigError(
            f"cluster.gpus_per_node={gpus}, but Slurm gave this node {len(have)} ({DEVICES_VARIABLE}={given}); ask for more with "
            "--gpus-per-node, or lower cluster.gpus_per_node"
        )
    return ",".join(have[device] for device in devices)
