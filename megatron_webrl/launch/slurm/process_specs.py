"""Command line, environment, cores and log of each process that a node starts. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.launch import role_process
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.placement import DEVICES_VARIABLE, Placement, ProcessPlacement, RoleName, visible_devices

CORES_VARIABLE = "WEBRL_CORES"


@dataclass(frozen=True)
class ProcessSpec:
    name: str
    command: tuple[str, ...]
    environment: dict[str, str]  # added to the environment of the supervisor
    cores: tuple[int, ...]  # empty: any
    log: Path

    def shell_command(self) -> str:
        """The command with its environment, in shell syntax."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])


def process_specs(
    config: Config,
    placement: Placement,
    node: int,
    role: RoleName,
    first_host: str,
    inherited: Mapping[str, str],
    stub_command: str,
) -> list[ProcessSpec]:
    """The processes of a role on a node. Raises ConfigError.

    `first_host`: of the first node; `inherited`: the supervisor's environment; `stub_command`: instead of `webrl`.
    """
    return [
        ProcessSpec(
            process.name,
            (*(shlex.split(stub_command) or role_process.webrl_command(())), *_arguments(config, process)),
            _environment(config, placement, process, first_host, inherited),
            process.cores,
            log_folder(config, node) / f"{process.name}.log",
        )
        for process in placement.on_node(node)
        if process.role == role
    ]


def log_folder(config: Config, node: int) -> Path:
    return config.run_folder / "logs" / f"node-{node}"


def _arguments(config: Config, process: ProcessPlacement) -> list[str]:
    arguments = [process.role, *role_process.role_arguments(config)]
    if process.role == "rollout":
        arguments += ["--worker", str(process.index)]
        arguments += ["--follower", str(process.follower)] if process.follower else []
    return arguments if config.cluster.nodes == 1 else [*arguments, "--node", str(process.node)]


def _environment(
    config: Config, placement: Placement, process: ProcessPlacement, first_host: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    # MASTER_PORT is a port of the placement, so that no two process groups of the job meet at the same one.
    if process.role == "trainer":
        first = next(each for each in placement.processes if each.role == "trainer" and each.index == 0)
        environment = role_process.rank_environment(
            process.index, config.trainer_world_size, process.local_rank, config.weights.timeout_seconds, inherited
        )
        environment |= {"MASTER_ADDR": first_host, "MASTER_PORT": str(first.port)}
    else:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.port)}
    if process.devices:
        environment[DEVICES_VARIABLE] = visible_devices(
            process.devices, inherited.get(DEVICES_VARIABLE, ""), config.cluster.gpus_per_node
        )
    if process.cores:
        environment[CORES_VARIABLE] = format_cores(process.cores)
    if config.cluster.nics and "NCCL_IB_HCA" not in inherited:
        # All cards of the node for every process: NCCL needs equal lists, and gives each GPU the nearest card.
        environment["NCCL_IB_HCA"] = "=" + ",".join(dict.fromkeys(config.cluster.nics))
    return environment
