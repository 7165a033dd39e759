"""The lock of a run's folder, and a folder of its own for each launch, on local file systems and on NFS.

    runs/x/lock                            locked by the process that runs the newest launch
    runs/x/launch.json                     the newest launch: number, host, process, Slurm job
    runs/x/checkpoints/.staging-000003/    where launch 3 writes checkpoints before they get their names

The lock keeps other launches out. The kernel releases it with its process, a file server soon after it has lost the
client. A later launch of the same Slurm job replaces it: Slurm may requeue a job before the processes of a lost node
have ended. Such a process may wake up and find its launch succeeded (`check`). It can publish nothing, also between a
check and a write: a launch moves the staging folders of earlier ones away, in which every rename of a checkpoint and of
`latest` starts, and copies their histories, so that a file which a process has open is no longer the run's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util import atomic_file, history

log = logging.getLogger(__name__)

LOCK_FILE, LAUNCH_FILE = "lock", "launch.json"
VARIABLE = "WEBRL_LAUNCH"  # number of the launch, in the environment of a node's roles
STAGING_PREFIX = ".staging-"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LaunchLost(ConfigError):
    """Another launch has taken over the run's folder. The message names it."""

    def __init__(self, run_folder: Path, newest: Launch | None) -> None:
        by = f": {newest}" if newest is not None else ""
        super().__init__(f"another launch has taken over {run_folder}{by}; this one ends, writing no more")


@dataclass(frozen=True)
class Launch:
    """One launch of a run; every process of it may have one of these."""

    run_folder: Path
    number: int  # from 1
    host: str
    pid: int
    slurm_job_id: str  # empty outside Slurm
    slurm_restart: int
    time: float  # unix time, seconds

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        job = f"launch {self.slurm_restart + 1} of job {self.slurm_job_id}"
        return f"{job if self.slurm_job_id else f'pid {self.pid}'} on {self.host}, since {since}"

    @property
    def staging(self) -> Path:
        """The folder in which this launch writes checkpoints."""
        return _staging(self.run_folder, self.number)

    def check(self) -> None:
        """Raise LaunchLost if another launch has taken over. A file system that fails is no other launch."""
        with suppress(OSError):
            newest = newest_launch(self.run_folder)  # opens the file, because NFS caches lookups
            if newest is None or newest.number != self.number:
                raise LaunchLost(self.run_folder, newest)

    @contextmanager
    def locked(self) -> Iterator[Launch]:
        """Hold the run's lock for a later process of the launch. Raises ConfigError if another launch has it."""
        with lock_run(self.run_folder, self.slurm_job_id, self.slurm_restart):
            self.check()
            yield self


def newest_launch(run_folder: Path) -> Launch | None:
    """The newest launch of a run; None without any. Raises OSError."""
    try:
        return Launch(run_folder, **json.loads((run_folder / LAUNCH_FILE).read_text()))
    except FileNotFoundError:
        return None


def launch_of_process(run_folder: Path, environment: Mapping[str, str]) -> Launch | None:
    """The launch to which this process belongs; None if it was started by hand.

    Raises LaunchLost if another launch has taken over, OSError.
    """
    newest = newest_launch(run_folder)
    if newest is None or not environment.keys() & {VARIABLE, "SLURM_JOB_ID"}:
        return None
    own = environment.get(VARIABLE, "") == str(newest.number)
    if VARIABLE not in environment:
        own = (newest.slurm_job_id, newest.slurm_restart) == _slurm_launch(environment)
    if not own:
        raise LaunchLost(run_folder, newest)
    return newest


def _staging(run_folder: Path, number: int) -> Path:
    return run_folder / "checkpoints" / f"{STAGING_PREFIX}{number:06d}"


@contextmanager
def lock_run(run_folder: Path, slurm_job_id: str = "", slurm_restart: int = 0) -> Iterator[None]:
    """Hold the lock of a run; that of an earlier launch of the same Slurm job is replaced.

    Raises ConfigError if another launch has it.
    """
    path = run_folder / LOCK_FILE
    while (descriptor := _try_lock(path)) is None:
        holder = newest_launch(run_folder)
        is_earlier = holder is not None and holder.slurm_job_id == slurm_job_id and holder.slurm_restart < slurm_restart
        if not (slurm_job_id and is_earlier):
            who = "" if holder is None else f", {holder}"
            way = "wait for its end, or choose another run.name"
            raise ConfigError(f"run.name={run_folder.name}: a job runs in {run_folder}{who}; {way}")
        path.unlink(missing_ok=True)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed; None if another process has it. Raises OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            log.warning("%s: %s; a second launch of the run would end this one", path, error.strerror)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # of a file that a later launch has replaced


@contextmanager
def start_launch(run_folder: Path, environment: Mapping[str, str]) -> Iterator[Launch]:
    """Start a launch in a run's folder, which is made if it does not exist, and hold the run's lock.

    Raises ConfigError if another launch has the lock, or the folder cannot be written.
    """
    job, restart = _slurm_launch(environment)
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    with ExitStack() as held:
        try:
            (run_folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            atomic_file.fsync(run_folder)
            atomic_file.fsync(run_folder.parent)
            held.enter_context(lock_run(run_folder, job, restart))
            before = newest_launch(run_folder)
            if before is not None and before.slurm_job_id == job != "" and before.slurm_restart > restart:
                raise LaunchLost(run_folder, before)
            number = 1 + max((before.number if before else 0, *_staging_numbers(run_folder)))
            launch = Launch(run_folder, number, host, os.getpid(), job, restart, time.time())
            launch.staging.mkdir()  # fails if another launch starts at once, on a file system without locks
            fields = {name: value for name, value in asdict(launch).items() if name != "run_folder"}
            atomic_file.write_json(run_folder / LAUNCH_FILE, fields)
            _keep_out_earlier(launch)
        except OSError as error:
            raise ConfigError(
                f"{run_folder} cannot be written: {error.strerror}; set run.directory to a folder that can be"
            ) from error
        yield launch


def _keep_out_earlier(launch: Launch) -> None:
    """Move the staging folders of earlier launches away, and copy their histories."""
    for number in _staging_numbers(launch.run_folder):
        if number < launch.number:
            with suppress(FileNotFoundError):
                _staging(launch.run_folder, number).rename(launch.staging / f"left-{number}")
    atomic_file.fsync(launch.run_folder / "checkpoints")
    if launch.number > 1:
        for path in launch.run_folder.glob("*.jsonl"):
            history.detach_writers(path)


def _staging_numbers(run_folder: Path) -> list[int]:
    """Numbers of the launches that have a staging folder in a run's folder."""
    names = [path.name.removeprefix(STAGING_PREFIX) for path in (run_folder / "checkpoints").glob(f"{STAGING_PREFIX}*")]
    return [int(name) for name in names if name.isdigit()]


def _slurm_launch(environment: Mapping[str, str]) -> tuple[str, int]:
    """The Slurm job of an environment and its number of requeues; empty and 0 outside Slurm."""
    job = environment.get("SLURM_JOB_ID", "")
    return job, int(environment.get("SLURM_RESTART_COUNT", "0")) if job else 0
