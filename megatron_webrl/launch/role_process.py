"""Commands and environments of the processes of a job, its run folder, and the start of its control service."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.address import ControlAddress
from megatron_webrl.launch.gpu_environment import gpu_environment
from megatron_webrl.monitor.status.control_probe import ControlStatus, query
from megatron_webrl.ring.segment import sweep_segments
from megatron_webrl.rollout.engine.shared_memory import sweep_engine_segments
from megatron_webrl.track.run_lock import Launch, start_launch
from megatron_webrl.util import atomic_file, child_process
from megatron_webrl.util.supervised_process import SupervisedProcess

EXIT_GRACE_SECONDS = 60.0  # for roles to exit after a clean outcome: last records, artifacts of the checkpoint
FAILED_EXIT_GRACE_SECONDS = 5.0  # after a failure: a role that waits for a dead one does not exit by itself
KILL_SECONDS = 8.0
INFRASTRUCTURE_EXIT_CODE = 74  # of a role or a job that lost its file system, or a job that lost its control service
_FILE_SYSTEM_ERRORS = {errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EROFS}


class RoleStartError(RuntimeError):
    """A role did not start. The message names it."""


def is_file_system_failure(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that a file system failed; a full disk is no such failure."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FILE_SYSTEM_ERRORS:
            return True
        error = error.__cause__
    return False


def webrl_command(arguments: Sequence[str]) -> list[str]:
    """The `webrl` command, run by this Python."""
    return [sys.executable, "-m", "megatron_webrl", *arguments]


def config_path(config: Config) -> Path:
    """Path of the resolved configuration that every role reads."""
    return config.run_folder / "config.yaml"


def control_address_path(config: Config) -> Path:
    """Path of the file that holds the control service's address."""
    return config.run_folder / "control.json"


def role_arguments(config: Config) -> list[str]:
    """Arguments of every role but the control service."""
    return ["--config", str(config_path(config)), "--control", str(control_address_path(config))]


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
    config: Config, start: Callable[[str, list[str]], SupervisedProcess], host: str, port: int, scratch: Path
) -> None:
    """Start the control service with `start(name, arguments)` and wait until it listens.

    `port` 0: any free one. `scratch`: local folder for its journal, with which it can be started again. Raises
    RoleStartError if it exits, or does not listen within run.startup_timeout_seconds.
    """
    path = control_address_path(config)
    path.unlink(missing_ok=True)
    files = ["--address-file", str(path), "--journal", str(scratch / "control.journal")]
    arguments = ["control", "--config", str(config_path(config)), *files]
    role = start("control", [*arguments, "--host", host, "--port", str(port)])
    wait_for_control_address(path, config.run.startup_timeout_seconds, role.failure_message)


def wait_for_control_address(
    path: Path, seconds: float, poll_failure: Callable[[], str | None] = lambda: None
) -> ControlAddress:
    """Wait for the address of the control service and return it. Raises RoleStartError after `seconds`."""
    deadline = time.monotonic() + seconds
    while (address := ControlAddress.read(path)) is None:
        if failure := poll_failure():
            raise RoleStartError(failure)
        if time.monotonic() > deadline:
            raise RoleStartError(f"the control service did not start within {seconds:.0f} s")
        time.sleep(0.02)
    return address


@contextmanager
def prepared_run_folder(
    config: Config, report: Callable[[str], None], environment: Mapping[str, str] | None = None
) -> Iterator[Launch]:
    """Make the run's folder, store the configuration, and hold the run's lock; an earlier run of this name is renamed,
    unless resumed.

    The launch is that of the Slurm job of `environment`, or this process. Raises ConfigError while another job runs in
    the folder.
    """
    folder, environment = config.run_folder, environment or {}
    wait = report if "SLURM_JOB_ID" in environment else None  # nobody is there to start a batch job again
    if not config.run.resume and folder.exists():
        check_ended(config)
        with start_launch(folder, environment, wait):  # keeps out what is left of the earlier run
            number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
            backup = folder.with_name(f"{folder.name}.{number}")
            folder.rename(backup)
        report(f"renamed the earlier run of this name to {backup}")
    fallback = "" if config.evaluation.only else config.trainer.checkpoint.fallback_folder
    with start_launch(folder, environment, wait, fallback) as launch:
        (folder / "logs").mkdir(exist_ok=True)
        atomic_file.remove_leftovers(folder)
        (folder / "summary.json").unlink(missing_ok=True)
        save_config(config, config_path(config))
        yield launch


def check_ended(config: Config) -> None:
    """Raise ConfigError if the job in the run's folder runs: its control service answers.

    That of a job on one machine answers on this machine only.
    """
    address = ControlAddress.read(control_address_path(config))
    if address is None:
        return
    status = query(control_address_path(config))
    if isinstance(status, ControlStatus) and status.outcome is None:
        raise ConfigError(
            f"run.name={config.run.name}: a job runs in {config.run_folder}, its control service at "
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
    """Remove processes, shared memory and scratch folders of killed runs; returns a message, empty without any."""
    removed = child_process.sweep_orphans() + sweep_shared_memory() + child_process.sweep_scratch()
    return f"removed leftovers of a killed run: {', '.join(removed)}" if removed else ""


def sweep_shared_memory(prefix: str = "webrl-") -> list[str]:
    """Remove the rings with this prefix, and segments of engines, that no process uses; returns their names."""
    return sweep_segments(prefix) + sweep_engine_segments()
