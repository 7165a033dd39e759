"""events.jsonl of a run: events of its processes, written by their supervisors.

One JSON line per event, appended and never changed, so that restarts and their reasons outlive the job. A line is
shorter than 4 KiB and written by one write call to a file opened with O_APPEND: on a local file system the lines of
several writers never mix. NFS has no atomic append: therefore a writer locks the file (a POSIX lock, which NFS passes
to its server, and after which a client reads the file's size again). Without locks, two nodes that write at once can
lose or break a line; readers skip broken lines.
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
JOB = "job"  # role of the events of the job as a whole: `started` and `ended`

STARTED, RESTARTED, FAILED, KILLED, ENDED = "started", "restarted", "failed", "killed", "ended"
"""The kinds from which `webrl status` derives states; it lists other kinds as they are."""

MAX_LINE_BYTES = 4096
LOCK_TIMEOUT_SECONDS = 2.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class ProcessEvent:
    """One event of a process, or of the job."""

    time: float  # unix time, seconds
    role: str  # name of the process, or JOB
    event: str
    node: int = 0
    host: str = ""  # under Slurm its node name
    reason: str = ""
    log: str = ""  # log file of the process, relative to the run's folder if inside it
    slurm_job_id: str = ""

    def to_json_line(self) -> bytes:
        """The line of the file; a reason that is too long is cut."""
        encoded = json.dumps(asdict(self), ensure_ascii=False).encode(errors="replace") + b"\n"
        if len(encoded) <= MAX_LINE_BYTES:
            return encoded
        return replace(self, reason=self.reason[: len(self.reason) // 2]).to_json_line()


@dataclass(frozen=True)
class EventLog:
    """Writes the events of one supervisor: the local launcher, or the supervisor of a node."""

    folder: Path  # the run's folder
    node: int = 0

    def add(self, role: str, event: str, reason: str = "", log: Path | None = None) -> None:
        """Append an event. A write error is logged only: it is no reason to end a job."""
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
            log.warning("could not write to %s (%s %s): %s", self.folder / FILE, roles[0][0], event, error)

    def _relative(self, path: Path | None) -> str:
        if path is None:
            return ""
        return str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)


def read_events(folder: Path) -> list[ProcessEvent]:
    """The events so far, ordered by time; broken lines are skipped, unknown fields ignored."""
    path = folder / FILE
    if not path.is_file():
        return []
    events = [event for line in path.read_bytes().splitlines() if (event := _parse(line)) is not None]
    return sorted(events, key=lambda event: event.time)


def events_of_last_job(events: Sequence[ProcessEvent]) -> list[ProcessEvent]:
    """The events since the last start of a job; a run that was resumed or requeued has several jobs."""
    first = max((i for i, event in enumerate(events) if (event.role, event.event) == (JOB, STARTED)), default=0)
    return list(events[first:])


def _parse(line: bytes) -> ProcessEvent | None:
    try:
        content = json.loads(line)
        known = {field.name for field in fields(ProcessEvent)}
        event = ProcessEvent(**{name: value for name, value in content.items() if name in known})
    except (ValueError, TypeError, AttributeError):  # half a line, or not an event
        return None
    return event if isinstance(event.time, int | float) else None


def _append(path: Path, lines: Sequence[bytes]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # terminate half a line that a full disk left
        for line in lines:
            os.write(descriptor, line)
    finally:
        os.close(descriptor)  # also releases the lock


def _lock(descriptor: int) -> None:
    """Take the lock, or continue without it after a timeout: a lost line is better than a supervisor that hangs."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        except OSError:  # this file system has no locks
            return
        else:
            return
