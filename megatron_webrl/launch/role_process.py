"""How the local launcher and the node supervisor start, check and restart the processes of a job."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.cluster.placement import worker_name_of
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.gpu_environment import gpu_environment
from megatron_webrl.ring.segment import sweep_segments
from megatron_webrl.status.control_probe import ControlAddress, ControlProbe, ControlStatus
from megatron_webrl.system import atomic_file, child_process

if TYPE_CHECKING:
    from megatron_webrl.control.control_plane import ControlClient

log = logging.getLogger(__name__)

EXIT_GRACE_SECONDS = 60.0  # for roles to exit after a clean outcome: last records, artifacts of the checkpoint
FAILED_EXIT_GRACE_SECONDS = 5.0  # after a failure: a role that waits for a dead one does not exit by itself
KILL_SECONDS = 8.0


class RoleStartError(RuntimeError):
    """A role did not start. The message names it."""


@dataclass
class RoleProcess:
    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...] = ()
    restart_count: int = 0

    @classmethod
    def start(
        cls, name: str, command: list[str], environment: dict[str, str], log: Path, cores: tuple[int, ...] = ()
    ) -> RoleProcess:
        """Start the process, bound to `cores` if any are given."""
        process = child_process.start_process(command, log, environment, name, (), cores)
        return cls(name, command, environment, log, process, cores)

    def restart(self) -> None:
        """Kill what is left of the process group and start the process again."""
        child_process.kill_process_group(self.process.pid)
        self.process = child_process.start_process(self.command, self.log, self.environment, self.name, (), self.cores)
        self.restart_count += 1

    def failure_message(self) -> str | None:
        """How the process failed; None while it runs and after exit code 0."""
        code = self.process.poll()
        if code is None or code == 0:
            return None
        line = child_process.last_log_line(self.log)
        return f"{self.name} {child_process.describe_exit(code)}; last log line: {line} (log: {self.log})"


def restart_worker(role: RoleProcess, config: Config, control: ControlClient, failure: str) -> str | None:
    """Restart a rollout worker or an engine follower; returns a message for the user.

    None: another role, no restarts left, or a worker that exited by itself before it had served: it would again.
    """
    worker = worker_name_of(role.name)
    if worker not in config.worker_names or role.restart_count >= config.run.max_worker_restarts:
        return None
    killed = (role.process.poll() or 0) < 0
    if not killed and control.get_json(f"weights/applied/{worker}") is None:
        return None
    control.clear_heartbeat(role.name)
    role.restart()
    count = f"attempt {role.restart_count} of {config.run.max_worker_restarts}"
    message = f"{failure}; restarting {role.name} ({count})"
    log.warning("%s", message)
    return message


def webrl_command(arguments: Sequence[str]) -> list[str]:
    """The `webrl` command, run by this Python."""
    return [sys.executable, "-m", "megatron_webrl.cli", *arguments]


def config_path(config: Config) -> Path:
    """Path of the resolved configuration that every role reads."""
    return config.run_folder / "config.yaml"


def control_address_path(config: Config) -> Path:
    """Path of the file that holds the control plane's address."""
    return config.run_folder / "control.json"


def role_arguments(config: Config, address: str) -> list[str]:
    """Arguments of every role but the control plane; `address`: HOST:PORT of the control plane."""
    return ["--config", str(config_path(config)), "--control", address]


def rank_environment(
    rank: int, world_size: int, local_rank: int, link_timeout_seconds: float, inherited: Mapping[str, str]
) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK of a trainer rank, and variables that the inherited environment does not set.

    Those are one OpenMP thread; 32 hardware queues of the GPU, since a rank has a communicator for each engine that it
    sends to, and work on one would wait for unrelated work on another in the same queue; and the limit for creating
    such a communicator, `link_timeout_seconds`, which torch reads only once in a process.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(link_timeout_seconds)),
    }
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    return variables | {name: value for name, value in defaults.items() if name not in inherited}


def start_control_process(
    config: Config, start: Callable[[str, list[str]], RoleProcess], host: str, port: int
) -> tuple[str, int]:
    """Start the control plane with `start(name, arguments)` and wait until it listens; returns host and port.

    `port` 0: any free one. Raises RoleStartError if it exits, or does not listen within run.startup_timeout_seconds.
    """
    path = control_address_path(config)
    path.unlink(missing_ok=True)
    arguments = ["control", "--config", str(config_path(config)), "--address-file", str(path)]
    role = start("control", [*arguments, "--host", host, "--port", str(port)])
    return wait_for_control_address(path, config.run.startup_timeout_seconds, role.failure_message)


def wait_for_control_address(
    path: Path, seconds: float, poll_failure: Callable[[], str | None] = lambda: None
) -> tuple[str, int]:
    """Wait for the control plane's address file; returns host and port. Raises RoleStartError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if failure := poll_failure():
            raise RoleStartError(failure)
        if time.monotonic() > deadline:
            raise RoleStartError(f"the control plane did not start within {seconds:.0f} s")
        time.sleep(0.02)
    fields = json.loads(path.read_text())
    return fields["host"], fields["port"]


def prepare_run_folder(config: Config, report: Callable[[str], None]) -> None:
    """Make the run's folder and store the configuration; an earlier run of this name is renamed, unless resumed.

    Raises ConfigError instead of renaming the folder of a job that runs.
    """
    folder = config.run_folder
    if not config.run.resume and folder.exists():
        check_ended(config)
        number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        backup = folder.with_name(f"{folder.name}.{number}")
        folder.rename(backup)
        report(f"renamed the earlier run of this name to {backup}")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    atomic_file.remove_leftovers(folder)
    (folder / "summary.json").unlink(missing_ok=True)
    save_config(config, config_path(config))


def check_ended(config: Config) -> None:
    """Raise ConfigError if the job in the run's folder runs: its control plane answers.

    That of a job on one machine answers on this machine only.
    """
    address = ControlAddress.read(control_address_path(config))
    if address is None:
        return
    with ControlProbe() as probe:
        status = probe.query(address, ())
    if isinstance(status, ControlStatus) and status.outcome is None:
        raise ConfigError(
            f"run.name={config.run.name}: a job runs in {config.run_folder}, its control plane at "
            f"{address.host}:{address.port} answers; wait for its end, or choose another run.name"
        )


def role_environment(
    config: Config, role: str, scratch: Path, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a process of `role` ("trainer", "rollout" or another).

    The inherited one, by default this process's, with `scratch` as TMPDIR and the variables of `gpu_environment`.
    """
    inherited = os.environ if inherited is None else inherited
    return {**inherited, **gpu_environment(config, role, inherited), "TMPDIR": str(scratch)}


def sweep_leftovers() -> str:
    """Remove processes, rings and scratch folders of killed runs; returns a message, empty if there were none."""
    removed = child_process.sweep_orphans() + sweep_segments("webrl-") + child_process.sweep_scratch()
    return f"removed leftovers of a killed run: {', '.join(removed)}" if removed else ""
