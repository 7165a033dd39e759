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

from megatron_webrl import processes
from megatron_webrl.config import Config, save
from megatron_webrl.placement import worker_of

if TYPE_CHECKING:
    from megatron_webrl.control import Control

log = logging.getLogger(__name__)

GRACE_SECONDS = 60.0  # for roles to end after a good outcome: the last records, the checkpoint's artifacts
HURRY_SECONDS = 5.0  # after another outcome: a role that waits for one that is gone will not end by itself
KILL_SECONDS = 8.0


class StartError(RuntimeError):
    """A role did not come up. The message names it."""


@dataclass
class Role:
    """One process of the job."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...] = ()
    restarts: int = 0

    @classmethod
    def start(
        cls, name: str, command: list[str], environment: dict[str, str], log: Path, cores: tuple[int, ...] = ()
    ) -> Role:
        """Start the process, bound to `cores` if there are any."""
        return cls(name, command, environment, log, processes.start(command, log, environment, name, (), cores), cores)

    def restart(self) -> None:
        """Start the process again; what is left of the one before is killed."""
        processes.kill_group(self.process.pid)  # it led one of its own
        self.process = processes.start(self.command, self.log, self.environment, self.name, (), self.cores)
        self.restarts += 1

    def failure(self) -> str | None:
        """How it ended, if it ended badly."""
        code = self.process.poll()
        if code is None or code == 0:
            return None
        words = processes.last_words(self.log)
        return f"{self.name} {processes.how_it_ended(code)}; its last words: {words} (log: {self.log})"


def revive(role: Role, config: Config, control: Control, failure: str) -> str | None:
    """Start a rollout worker again, or a part of its engine, unless that is pointless or was done too often.

    Returns what to tell people.
    """
    worker = worker_of(role.name)
    if worker not in config.workers or role.restarts >= config.run.restarts:
        return None
    killed = (role.process.poll() or 0) < 0
    if not killed and control.value(f"weights/taken/{worker}") is None:
        return None  # it never came up, and would not the next time
    control.forget(role.name)
    role.restart()
    told = f"{failure}; started again, time {role.restarts} of {config.run.restarts}"
    log.warning("%s", told)
    return told


def webrl(arguments: Sequence[str]) -> list[str]:
    """The `webrl` command, run by this Python."""
    return [sys.executable, "-m", "megatron_webrl.cli", *arguments]


def settings_file(config: Config) -> Path:
    """The resolved configuration that every role reads."""
    return config.run_folder / "config.yaml"


def address_file(config: Config) -> Path:
    """Where the control plane says how to reach it."""
    return config.run_folder / "control.json"


def where(config: Config, address: str) -> list[str]:
    """Arguments of every role but the control plane: its configuration, and the control plane's HOST:PORT."""
    return ["--config", str(settings_file(config)), "--control", address]


def rank_environment(rank: int, ranks: int, local: int, given: Mapping[str, str]) -> dict[str, str]:
    """What tells a trainer rank its place; one thread, unless the environment it is `given` says otherwise."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(local)}
    return place if "OMP_NUM_THREADS" in given else place | {"OMP_NUM_THREADS": "1"}


def start_control(config: Config, start: Callable[[str, list[str]], Role], *overrides: str) -> tuple[str, int]:
    """Start the control plane through `start(name, arguments)` and wait until it answers; returns host and port.

    Raises StartError if it ends, or says nothing within run.start_seconds.
    """
    path, seconds = address_file(config), config.run.start_seconds
    path.unlink(missing_ok=True)
    arguments = ["control", "--config", str(settings_file(config)), "--address-file", str(path), *overrides]
    role = start("control", arguments)
    return await_address(path, seconds, role.failure)


def await_address(path: Path, seconds: float, failure: Callable[[], str | None] = lambda: None) -> tuple[str, int]:
    """Host and port of the control plane, once it has written them. Raises StartError."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if found := failure():
            raise StartError(found)
        if time.monotonic() > deadline:
            raise StartError(f"the control plane did not come up within {seconds:.0f} s")
        time.sleep(0.02)
    fields = json.loads(path.read_text())
    return fields["host"], fields["port"]


def prepare_folder(config: Config, tell: Callable[[str], None]) -> None:
    """Make the run's folder and store the configuration; the files of an earlier run of this name are kept aside."""
    folder = config.run_folder
    if not config.run.resume and folder.exists():
        number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        aside = folder.with_name(f"{folder.name}.{number}")
        folder.rename(aside)
        tell(f"the earlier run of this name is kept as {aside}")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)
    save(config, settings_file(config))


def role_environment(scratch: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every role: this process's, and a folder for its temporary files."""
    return {**(os.environ if given is None else given), "TMPDIR": str(scratch)}
