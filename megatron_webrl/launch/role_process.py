"""The processes of a job: how one is started, and what launcher (one machine) and node (of many) tell it.

Arguments and environments are pure functions of the configuration. Who starts roles watches them: `Role.failure` says
how one ended, `revive` starts a rollout worker again where that has a point.
"""

from __future__ import annotations

import json
import logging
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
from megatron_webrl.system import child_process

if TYPE_CHECKING:
    from megatron_webrl.control.control_plane import ControlClient

log = logging.getLogger(__name__)

EXIT_GRACE_SECONDS = 60.0  # for roles to end after a good outcome: the last records, the checkpoint's artifacts
FAILED_EXIT_GRACE_SECONDS = 5.0  # after another outcome: a role that waits for one that is gone will not end by itself
KILL_SECONDS = 8.0


class RoleStartError(RuntimeError):
    """A role did not come up. The message names it."""


@dataclass
class RoleProcess:
    """One process of the job."""

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
        """Start the process, bound to `cores` if there are any."""
        return cls(
            name,
            command,
            environment,
            log,
            child_process.start_process(command, log, environment, name, (), cores),
            cores,
        )

    def restart(self) -> None:
        """Start the process again; what is left of the one before is killed."""
        child_process.kill_process_group(self.process.pid)  # it led one of its own
        self.process = child_process.start_process(self.command, self.log, self.environment, self.name, (), self.cores)
        self.restart_count += 1

    def failure_message(self) -> str | None:
        """How it ended, if it ended badly."""
        code = self.process.poll()
        if code is None or code == 0:
            return None
        words = child_process.last_log_line(self.log)
        return f"{self.name} {child_process.describe_exit(code)}; last log line: {words} (log: {self.log})"


def restart_worker(role: RoleProcess, config: Config, control: ControlClient, failure: str) -> str | None:
    """Start a rollout worker again, or a part of its engine, unless that is pointless or was done too often.

    Returns what to tell people.
    """
    worker = worker_name_of(role.name)
    if worker not in config.worker_names or role.restart_count >= config.run.max_worker_restarts:
        return None
    killed = (role.process.poll() or 0) < 0
    if not killed and control.get_json(f"weights/applied/{worker}") is None:
        return None  # it never came up, and would not the next time
    control.clear_heartbeat(role.name)
    role.restart()
    told = f"{failure}; started again, time {role.restart_count} of {config.run.max_worker_restarts}"
    log.warning("%s", told)
    return told


def webrl_command(arguments: Sequence[str]) -> list[str]:
    """The `webrl` command, run by this Python."""
    return [sys.executable, "-m", "megatron_webrl.cli", *arguments]


def config_path(config: Config) -> Path:
    """The resolved configuration that every role reads."""
    return config.run_folder / "config.yaml"


def control_address_path(config: Config) -> Path:
    """Where the control plane says how to reach it."""
    return config.run_folder / "control.json"


def role_arguments(config: Config, address: str) -> list[str]:
    """Arguments of every role but the control plane: its configuration, and the control plane's HOST:PORT."""
    return ["--config", str(config_path(config)), "--control", address]


def rank_environment(rank: int, ranks: int, local: int, given: Mapping[str, str]) -> dict[str, str]:
    """What tells a trainer rank its place; one thread, unless the environment it is `given` says otherwise."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(local)}
    return place if "OMP_NUM_THREADS" in given else place | {"OMP_NUM_THREADS": "1"}


def start_control_process(
    config: Config, start: Callable[[str, list[str]], RoleProcess], *overrides: str
) -> tuple[str, int]:
    """Start the control plane through `start(name, arguments)` and wait until it answers; returns host and port.

    Raises StartError if it ends, or says nothing within run.startup_timeout_seconds.
    """
    path, seconds = control_address_path(config), config.run.startup_timeout_seconds
    path.unlink(missing_ok=True)
    arguments = ["control", "--config", str(config_path(config)), "--address-file", str(path), *overrides]
    role = start("control", arguments)
    return wait_for_control_address(path, seconds, role.failure_message)


def wait_for_control_address(
    path: Path, seconds: float, failure: Callable[[], str | None] = lambda: None
) -> tuple[str, int]:
    """Host and port of the control plane, once it has written them. Raises StartError."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if found := failure():
            raise RoleStartError(found)
        if time.monotonic() > deadline:
            raise RoleStartError(f"the control plane did not come up within {seconds:.0f} s")
        time.sleep(0.02)
    fields = json.loads(path.read_text())
    return fields["host"], fields["port"]


def prepare_run_folder(config: Config, tell: Callable[[str], None]) -> None:
    """Make the run's folder and store the configuration; the files of an earlier run of this name are kept aside."""
    folder = config.run_folder
    if not config.run.resume and folder.exists():
        number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        aside = folder.with_name(f"{folder.name}.{number}")
        folder.rename(aside)
        tell(f"the earlier run of this name is kept as {aside}")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)
    save_config(config, config_path(config))


def role_environment(scratch: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every role: this process's, and a folder for its temporary files."""
    return {**(os.environ if given is None else given), "TMPDIR": str(scratch)}
