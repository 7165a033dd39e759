"""events.jsonl of a run: events of its processes, written by their nodes.

One JSON line per event, appended and never changed, so that restarts and their reasons outlive the job.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_webrl.util import history
from megatron_webrl.util.atomic_file import continue_without
from megatron_webrl.util.text import printable

FILE = "events.jsonl"
JOB = "job"  # role of the events of the job as a whole: `started` and `ended`

STARTED, RESTARTED, FAILED, KILLED, ENDED = "started", "restarted", "failed", "killed", "ended"
"""The kinds from which `webrl status` derives states; it lists other kinds as they are."""

MAX_LINE_BYTES = 4096


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
    """Writes the events of one node."""

    folder: Path  # the run's folder
    node: int = 0

    def add(self, role: str, event: str, reason: str = "", log: Path | None = None) -> None:
        """Append an event. A write error is logged only: it is no reason to end a job."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        slurm, path = os.environ.get("SLURM_JOB_ID", ""), self.folder / FILE
        where = "" if log is None else str(log.relative_to(self.folder) if log.is_relative_to(self.folder) else log)
        line = ProcessEvent(time.time(), role, event, self.node, host, reason, where, slurm).to_json_line()
        with continue_without(f"{path} ({role} {event})"):
            history.append_shared(path, [line])


def read_events(folder: Path) -> list[ProcessEvent]:
    """The events so far, ordered by time; broken lines are skipped, unknown fields ignored."""
    events = [event for content in history.read(folder / FILE) if (event := _event(content)) is not None]
    return sorted(events, key=lambda event: event.time)


def events_of_last_job(events: Sequence[ProcessEvent]) -> list[ProcessEvent]:
    """The events since the last start of a job; a run that was resumed or requeued has several jobs."""
    first = max((i for i, event in enumerate(events) if (event.role, event.event) == (JOB, STARTED)), default=0)
    return list(events[first:])


def _event(content: Any) -> ProcessEvent | None:
    try:
        known = {field.name for field in fields(ProcessEvent)}
        event = ProcessEvent(**{name: value for name, value in content.items() if name in known})
    except (TypeError, AttributeError):  # not an event
        return None
    return replace(event, reason=printable(str(event.reason))) if isinstance(event.time, int | float) else None
