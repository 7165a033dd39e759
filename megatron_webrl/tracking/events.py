"""events.jsonl of a run: what happened to its processes and when, written by whoever supervises them.

One line of JSON for each event, appended and never changed, so that restarts and their reasons outlive the job. A
line is shorter than 4 KiB and goes out in one write to a file opened with O_APPEND: on a local file system lines of
several writers never mix. NFS has no such append: two nodes that write at one moment could overwrite each other's
line. Therefore the writer holds a lock of the file meanwhile (POSIX, which NFS carries to its server, and after which
a client looks at the file's size anew). Where a mount has locks switched off, such a line can be lost or broken;
readers leave broken ones out.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "events.jsonl"
JOB = "job"
"""The role of events of the job as a whole: started and ended."""

STARTED, RESTARTED, FAILED, KILLED, ENDED = "started", "restarted", "failed", "killed", "ended"
"""The kinds that `webrl status` reads states from; others are listed as they are."""

MAX_LINE_BYTES = 4096
LOCK_SECONDS = 2.0
_PAUSE = 0.01


@dataclass(frozen=True)
class ProcessEvent:
    """One thing that happened to one process, or to the job."""

    time: float  # unix time, seconds
    role: str  # name of the process, or JOB
    event: str
    node: int = 0
    host: str = ""  # as Slurm calls it, where there is Slurm
    reason: str = ""
    log: str = ""  # of the process, relative to the run's folder where it lies in it
    slurm_job_id: str = ""  # number of the Slurm job, if there is one

    def to_json_line(self) -> bytes:
        """As it is written; a reason that is too long is cut."""
        encoded = json.dumps(asdict(self), ensure_ascii=False).encode(errors="replace") + b"\n"
        if len(encoded) <= MAX_LINE_BYTES:
            return encoded
        return replace(self, reason=self.reason[: len(self.reason) // 2]).to_json_line()


@dataclass(frozen=True)
class EventLog:
    """Writes the events of one supervisor: the launcher of a machine, or one of a node."""

    folder: Path  # of the run
    node: int = 0

    def add(self, role: str, event: str, reason: str = "", log: Path | None = None) -> None:
        """Append an event. One that cannot be written is told to the log: it is no reason to end a job."""
        self.add_all([(role, log)], event, reason)

    def add_all(self, roles: Sequence[tuple[str, Path | None]], event: str, reason: str = "") -> None:
        """Append the same event for several (role, log) at once."""
        here = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        slurm = os.environ.get("SLURM_JOB_ID", "")
        lines = [
            ProcessEvent(time.time(), role, event, self.node, here, reason, self._relative(path), slurm).to_json_line()
            for role, path in roles
        ]
        try:
            _append(self.folder / FILE, lines)
        except OSError as error:
            log.warning("%s took no event (%s %s): %s", self.folder / FILE, roles[0][0], event, error)

    def _relative(self, path: Path | None) -> str:
        if path is None:
            return ""
        return str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)


def read_events(folder: Path) -> list[ProcessEvent]:
    """The events so far, in the order of their times; broken lines are left out, unknown fields ignored."""
    path = folder / FILE
    if not path.is_file():
        return []
    found = [event for line in path.read_bytes().splitlines() if (event := _parse(line)) is not None]
    return sorted(found, key=lambda event: event.time)


def events_of_last_job(events: Sequence[ProcessEvent]) -> list[ProcessEvent]:
    """Those since the last start of a job; a run that was resumed, or that Slurm has started again, has several."""
    first = max((i for i, event in enumerate(events) if (event.role, event.event) == (JOB, STARTED)), default=0)
    return list(events[first:])


def _parse(line: bytes) -> ProcessEvent | None:
    try:
        content = json.loads(line)
        known = {field.name for field in fields(ProcessEvent)}
        event = ProcessEvent(**{name: value for name, value in content.items() if name in known})
    except (ValueError, TypeError, AttributeError):  # half a line, or no object with what an event needs
        return None
    return event if isinstance(event.time, int | float) else None


def _append(path: Path, lines: Sequence[bytes]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # half a line, of a disk that was full: the next one stays whole
        for line in lines:
            os.write(descriptor, line)
    finally:
        os.close(descriptor)  # and with it the lock


def _lock(descriptor: int) -> None:
    """Take the lock, or go on without it after LOCK_SECONDS: a lost line is less than a supervisor that hangs."""
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        except OSError:  # this file system has no locks
            return
        else:
            return
