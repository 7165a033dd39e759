"""The lease of a run folder: at most one launch writes to it, on local file systems and on NFS.

    runs/x/lease/000003.json            the holder: job, host, process, time; its mtime is the last sign of life
    runs/x/checkpoints/.staging-000003-5f0c/   where the holder writes checkpoints before they get their names
    runs/x/fallback-b7e2/checkpoints/.staging-000003-5f0c/   the same in the fallback folder, if the run has one

Epochs only grow. A launch takes the lease by making the file of the next epoch, which is atomic, and then moves the
staging folders of all earlier ones away and copies their histories. A process of an earlier launch that wakes up later
finds its file gone (`check`), and can publish nothing: the rename of a checkpoint, and of `latest`, starts in its
staging folder, and the histories that it has open are no longer those of the run. That holds also between a check and
the rename or write, without a lock.

A lease is taken over at once from a launch that has ended, from a dead process on the same machine, and from an earlier
launch of the same Slurm job; otherwise when it has given no sign of life for TIMEOUT_SECONDS.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track.latest_checkpoint import FALLBACK_PREFIX, fallback_links, fallback_of
from megatron_webrl.util import atomic_file, child_process, history

log = logging.getLogger(__name__)

FOLDER = "lease"
VARIABLE = "WEBRL_LEASE"  # EPOCH:ID of the lease, in the environment of a local launch's roles
TIMEOUT_SECONDS = 180.0
HEARTBEAT_SECONDS = 15.0
STALL_TIMEOUT_SECONDS = 300.0  # from which a file system that does not answer counts as lost
STAGING_PREFIX = ".staging-"
_POLL_SECONDS = 1.0
_NAME = re.compile(r"(\d{6,})\.json")


class LeaseLost(ConfigError):
    """Another launch has taken over the run folder. The message names it."""


@dataclass(frozen=True)
class Holder:
    """A launch of a run."""

    lease_id: str
    host: str
    machine: str  # boot and pid namespace: pids can be compared within one
    pid: int  # 0: the launch does not end with a single process
    pid_started: int
    slurm_job_id: str
    slurm_restart: int
    time: float  # unix time, seconds
    released: bool = False

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str]) -> Holder:
        """The launch of a Slurm job if SLURM_JOB_ID is set in `environment`, else this process."""
        job, pid = environment.get("SLURM_JOB_ID", ""), os.getpid()
        return cls(
            lease_id=secrets.token_hex(4),
            host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
            machine=_machine(),
            pid=0 if job else pid,
            pid_started=0 if job else child_process.start_time(pid),
            slurm_job_id=job,
            slurm_restart=int(environment.get("SLURM_RESTART_COUNT", "0")) if job else 0,
            time=time.time(),
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        launch = f"pid {self.pid}"
        if self.slurm_job_id:
            launch = f"launch {self.slurm_restart + 1} of job {self.slurm_job_id}"
        return f"{launch} on {self.host}, since {since}"

    def has_ended_before(self, other: Holder) -> bool:
        """Whether this launch is known to have ended, or to be an earlier one of the other's Slurm job."""
        if self.released:
            return True
        if self.slurm_job_id:
            return self.slurm_job_id == other.slurm_job_id and self.slurm_restart < other.slurm_restart
        if self.machine != other.machine:
            return False
        return self.pid == os.getpid() or not child_process.is_alive(self.pid, self.pid_started)


@dataclass(frozen=True)
class RunLease:
    """A lease that this launch has taken; every process of the launch may have one of these."""

    run_folder: Path
    epoch: int
    lease_id: str

    @property
    def path(self) -> Path:
        return _path(self.run_folder, self.epoch)

    @property
    def staging(self) -> Path:
        """The folder in which this launch writes checkpoints."""
        return self.staging_in(self.run_folder)

    def staging_in(self, folder: Path) -> Path:
        """The same in the run's folder or in a fallback folder of it."""
        return folder / "checkpoints" / f"{STAGING_PREFIX}{self.epoch:06d}-{self.lease_id}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment by which `of_process` finds this lease."""
        return {VARIABLE: f"{self.epoch}:{self.lease_id}"}

    @property
    def is_held(self) -> bool:
        """Whether no other launch has taken over, and this one has not ended.

        It opens the file, because NFS caches lookups. A lease that cannot be read, as the file system fails, is held.
        """
        try:
            holder = _read(self.path)
        except OSError:
            return True
        return holder is not None and holder.lease_id == self.lease_id and not holder.released

    def check(self) -> None:
        """Raise LeaseLost if another launch has taken over."""
        if not self.is_held:
            newest = _newest(self.run_folder)
            by = f": {newest[1]}" if newest is not None and newest[1].lease_id != self.lease_id else ""
            raise LeaseLost(f"another launch has taken over {self.run_folder}{by}; this one ends and writes no more")

    def release(self) -> None:
        """Note that the launch has ended; without effect if another has taken over."""
        try:
            holder = _read(self.path)
            if holder is not None and holder.lease_id == self.lease_id:
                atomic_file.write_json(self.path, asdict(replace(holder, released=True)))
        except OSError as error:
            log.error("%s could not be released: %s", self.path, error)

    @contextmanager
    def kept_alive(self, on_stall: Callable[[str], None] = log.error) -> Iterator[None]:
        """Give a sign of life every HEARTBEAT_SECONDS in a thread. One that fails is tried again.

        `on_stall` is called once, in a thread, with a message if the file system lets one wait STALL_TIMEOUT_SECONDS.
        """
        end, waits_since = threading.Event(), math.inf

        def beat() -> None:
            nonlocal waits_since
            while not end.is_set():
                waits_since = time.monotonic()
                with suppress(OSError):  # a file system that fails; of a lost lease `check` tells
                    os.utime(self.path)
                waits_since = math.inf
                end.wait(HEARTBEAT_SECONDS)

        def watch() -> None:
            while not end.wait(_POLL_SECONDS):
                if time.monotonic() - waits_since > STALL_TIMEOUT_SECONDS:
                    on_stall(f"the file system of {self.run_folder} has stalled for {STALL_TIMEOUT_SECONDS:.0f} s")
                    return

        threads = [threading.Thread(target=each, name="run lease", daemon=True) for each in (beat, watch)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            end.set()
            for thread in threads:
                thread.join(_POLL_SECONDS)


def kept_alive(lease: RunLease | None, on_stall: Callable[[str], None] = log.error) -> AbstractContextManager[None]:
    """Give signs of life of a lease, if there is one."""
    return nullcontext() if lease is None else lease.kept_alive(on_stall)


def take(
    run_folder: Path, holder: Holder, report: Callable[[str], None] | None = None, fallback_folder: str = ""
) -> RunLease:
    """Take the lease of a run folder, which is made if it does not exist.

    Raises ConfigError if another launch holds it, or the folder cannot be written. With `report`, a holder that may be
    dead is waited for, after a line about that. `fallback_folder`: trainer.checkpoint.fallback_folder.
    """
    try:
        (run_folder / FOLDER).mkdir(parents=True, exist_ok=True)
        (run_folder / "checkpoints").mkdir(exist_ok=True)
        atomic_file.fsync(run_folder)
        atomic_file.fsync(run_folder.parent)
        lease = RunLease(run_folder, _wait_for_end(run_folder, holder, report) + 1, holder.lease_id)
        lease.staging.mkdir()  # before the lease is taken: its successor moves the folder away
        _prepare_fallback(lease, fallback_folder)
        if not _create(lease.path, holder) or not _is_newest(lease):
            for folder in _checkpoint_folders(run_folder):
                shutil.rmtree(lease.staging_in(folder), ignore_errors=True)
            newest = _newest(run_folder)
            winner = f": {newest[1]}" if newest is not None else ""
            raise ConfigError(f"run.name={run_folder.name}: another job has just started in {run_folder}{winner}")
        _remove_earlier(lease)
        for path in run_folder.glob("*.jsonl") if lease.epoch > 1 else ():
            history.detach_writers(path)
    except OSError as error:
        raise ConfigError(
            f"{run_folder} cannot be written: {error.strerror}; set run.directory to a folder that can be"
        ) from error
    return lease


def of_process(run_folder: Path, environment: Mapping[str, str]) -> RunLease | None:
    """The lease of the launch to which this process belongs; None if its launcher took none.

    Raises LeaseLost if another launch has taken over.
    """
    if VARIABLE in environment:
        number, _, lease_id = environment[VARIABLE].partition(":")
        lease = RunLease(run_folder, int(number), lease_id)
        lease.check()
        return lease
    newest = _newest(run_folder)
    if newest is None or "SLURM_JOB_ID" not in environment:
        return None
    epoch, holder = newest
    own = (environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0")))
    if (holder.slurm_job_id, holder.slurm_restart) != own:
        raise LeaseLost(f"another launch has taken over {run_folder}: {holder}; this one ends and writes no more")
    return RunLease(run_folder, epoch, holder.lease_id)


def _remove_earlier(lease: RunLease) -> None:
    """Move the staging folders of earlier epochs into this lease's, and remove their files."""
    for folder in _checkpoint_folders(lease.run_folder):
        for path in (folder / "checkpoints").glob(f"{STAGING_PREFIX}*"):
            name = path.name.removeprefix(STAGING_PREFIX)
            if int(name.partition("-")[0]) < lease.epoch:
                with suppress(FileNotFoundError):
                    path.rename(lease.staging_in(folder) / f"left-{name}")
    for epoch, file in _all(lease.run_folder):
        if epoch < lease.epoch:
            file.unlink(missing_ok=True)
    atomic_file.remove_leftovers(lease.path.parent)
    atomic_file.fsync(lease.path.parent)
    for folder in _checkpoint_folders(lease.run_folder):
        atomic_file.fsync(folder / "checkpoints")


def _prepare_fallback(lease: RunLease, fallback_folder: str) -> None:
    """Link the run to its folder in `fallback_folder`, and make the staging folder in each that it has.

    Raises ConfigError if one cannot be written, or is not there: it may hold the newest checkpoint.
    """
    run_folder, where = lease.run_folder, f"trainer.checkpoint.fallback_folder={fallback_folder}"
    try:
        if fallback_folder and fallback_of(run_folder, fallback_folder) is None:
            name = secrets.token_hex(4)  # other runs, elsewhere or of another time, have the same name
            target = Path(fallback_folder).resolve() / f"{run_folder.name}-{name}"
            (target / "checkpoints").mkdir(parents=True)
            (run_folder / f"{FALLBACK_PREFIX}{name}").symlink_to(target)
        for link in fallback_links(run_folder):
            where = f"{link}, which leads to {link.readlink()}"
            lease.staging_in(link).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{where}: {error.strerror}; the newest checkpoint may be there: mount it, or remove the setting and the "
            f"links {run_folder / FALLBACK_PREFIX}*"
        ) from error


def _checkpoint_folders(run_folder: Path) -> list[Path]:
    """The run's folder and its fallback folders."""
    return [run_folder, *fallback_links(run_folder)]


def _wait_for_end(run_folder: Path, own: Holder, report: Callable[[str], None] | None) -> int:
    """Wait until the lease may be taken; returns the epoch of the holder that has ended. Raises ConfigError."""
    first_sign: float | None = None
    while (newest := _newest(run_folder)) is not None:
        epoch, holder = newest
        path = _path(run_folder, epoch)
        if holder.has_ended_before(own):
            return epoch
        try:
            sign = path.stat().st_mtime
        except FileNotFoundError:  # its successor has taken over
            continue
        silent = _time_of(run_folder) - sign
        if silent > TIMEOUT_SECONDS:
            return epoch
        newer = holder.slurm_job_id == own.slurm_job_id != "" and holder.slurm_restart > own.slurm_restart
        alive = newer or (holder.pid and holder.machine == own.machine) or (first_sign not in (None, sign))
        if alive or report is None:
            way = (
                "wait for its end, or choose another run.name"
                if alive
                else f"its last sign of life is {max(0.0, silent):.0f} s old: if it has ended, start again in "
                f"{TIMEOUT_SECONDS - silent:.0f} s, or remove {path}"
            )
            raise ConfigError(f"run.name={run_folder.name}: a job runs in {run_folder}, {holder}; {way}")
        if first_sign is None:
            report(
                f"{run_folder} is held by {holder}, whose last sign of life is {max(0.0, silent):.0f} s old; "
                f"waiting until it is {TIMEOUT_SECONDS:.0f} s old"
            )
        first_sign = sign
        time.sleep(_POLL_SECONDS)
    return 0


def _create(path: Path, holder: Holder) -> bool:
    """Make the file with its content in one atomic step; returns whether this holder made it. Raises OSError."""
    temporary = atomic_file.temporary_path(path)
    try:
        atomic_file.write_json(temporary, asdict(holder))
        with suppress(FileExistsError):
            _link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    found = _read(path)  # NFS may report a lost race for a link that it made, when it repeats the request
    return found is not None and found.lease_id == holder.lease_id


def _link(temporary: Path, path: Path) -> None:
    """Give a file another name. Raises FileExistsError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with path.open("x") as file:
            file.write(temporary.read_text())


def _is_newest(lease: RunLease) -> bool:
    """False if other launches have taken and left later epochs meanwhile; then the file is removed."""
    newest = _newest(lease.run_folder)
    if newest is not None and newest[0] == lease.epoch:
        return True
    lease.path.unlink(missing_ok=True)
    return False


def _all(run_folder: Path) -> list[tuple[int, Path]]:
    folder = run_folder / FOLDER
    names = [match for name in (os.listdir(folder) if folder.is_dir() else ()) if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), folder / match[0]) for match in names)


def _newest(run_folder: Path) -> tuple[int, Holder] | None:
    """Epoch and holder of the newest lease; None without any."""
    for epoch, path in reversed(_all(run_folder)):
        if (holder := _read(path)) is not None:
            return epoch, holder
    return None


def _read(path: Path) -> Holder | None:
    """The holder in a file; None without the file. One that cannot be read is nobody known."""
    try:
        return Holder(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Holder("", "an unknown host", "", 0, 0, "", 0, 0.0)


def _time_of(run_folder: Path) -> float:
    """The time by the clock of the file system, which gives a lease its mtime."""
    probe = atomic_file.temporary_path(run_folder / FOLDER / "time")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _path(run_folder: Path, epoch: int) -> Path:
    return run_folder / FOLDER / f"{epoch:06d}.json"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
