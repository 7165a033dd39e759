"""The state of each process of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.monitor.status.control_probe import ControlStatus
from megatron_webrl.track import events as journal
from megatron_webrl.track.events import ProcessEvent
from megatron_webrl.types import CLEAN_JOB_OUTCOMES

TAIL_BYTES = 8192
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \S+ (?:INFO|WARNING|ERROR|CRITICAL) [\w.]+: ")


@dataclass(frozen=True)
class ProcessRestart:
    time: float  # unix time, seconds
    reason: str


@dataclass(frozen=True)
class RoleState:
    name: str
    node: int
    host: str
    state: str  # running, starting, silent, failed, ended, not started; unknown if the job does not respond
    status_line: str  # as the process reports it; the last line of its log if the job does not respond
    heartbeat_age_seconds: float | None
    started_at: float | None  # last start, unix time
    log: str
    restarts: list[ProcessRestart] = field(default_factory=list)


def role_states(
    folder: Path,
    names: Sequence[tuple[str, int]],
    job: Sequence[ProcessEvent],
    live: ControlStatus | None,
    job_state: tuple[str, str],
    heartbeat_timeout_seconds: float,
) -> list[RoleState]:
    """The state of each process in `names`, given as (name, node).

    `job`: events of the last job; `live`: the answer of the service, if any; `job_state`: (state, reason) of the job.
    """
    by_role: dict[str, list[ProcessEvent]] = {}
    for event in job:
        by_role.setdefault(event.role, []).append(event)
    found = []
    for name, node in names:
        events = by_role.get(name, [])
        state = _state(name, events, live, job_state, heartbeat_timeout_seconds)
        found.append(_role_state(folder, name, node, events, live, job_state, state))
    return found


def _role_state(
    folder: Path,
    name: str,
    node: int,
    events: Sequence[ProcessEvent],
    live: ControlStatus | None,
    job_state: tuple[str, str],
    state: str,
) -> RoleState:
    starts = [event for event in events if event.event in (journal.STARTED, journal.RESTARTED)]
    restarts = [event for event in events if event.event == journal.RESTARTED]
    log = _log_path(folder, name, node, events)
    status_line = ""
    if live is not None and not (restarts and state == "starting"):  # then it would be the previous instance's
        status_line = live.status_lines.get(name, "")
    if state == "failed":
        reason = next((event.reason for event in reversed(events) if event.event == journal.FAILED), job_state[1])
        status_line = strip_reason(reason, name)
    elif live is None and job_state[0] not in CLEAN_JOB_OUTCOMES:
        status_line = _last_line(log)
    return RoleState(
        name=name,
        node=node,
        host=starts[-1].host if starts else "",
        state=state,
        status_line=status_line,
        heartbeat_age_seconds=None if live is None else live.heartbeat_ages.get(name),
        started_at=starts[-1].time if starts else None,
        log=str(log),
        restarts=[ProcessRestart(event.time, strip_reason(event.reason, name)) for event in restarts],
    )


def _state(
    name: str,
    events: Sequence[ProcessEvent],
    live: ControlStatus | None,
    job_state: tuple[str, str],
    heartbeat_timeout_seconds: float,
) -> str:
    decisive = (journal.STARTED, journal.RESTARTED, journal.FAILED)
    last = next((event.event for event in reversed(events) if event.event in decisive), "")
    state, reason = job_state
    if last == journal.FAILED or (state == "failed" and reason.startswith((f"{name}:", f"{name} "))):
        return "failed"
    if live is None:
        if state == "silent":
            return "unknown"
        return "not started" if state == "starting" and not last else "ended"
    if name == "control":
        return "running"
    if name in live.heartbeat_ages:
        age = live.heartbeat_ages[name]
        return "silent" if age > heartbeat_timeout_seconds else "running"
    return "starting" if last or name in live.status_lines else "not started"


def strip_reason(reason: str, name: str) -> str:
    """A reason without what the tables show anyway: the role's name, the log's path, the prefix of its last line."""
    text = _LOGGED.sub("", reason.removeprefix(f"{name} ").removeprefix(f"{name}: "))
    return text[: text.rindex(" (log: ")] if text.endswith(")") and " (log: " in text else text


def _log_path(folder: Path, name: str, node: int, events: Iterable[ProcessEvent]) -> Path:
    if logs := [event.log for event in events if event.log]:
        return folder / logs[-1]
    node_folder = folder / "logs" / f"node-{node}"
    return (node_folder if node_folder.is_dir() else folder / "logs") / f"{name}.log"


def _last_line(path: Path) -> str:
    """The last line of a log that is not blank; empty without one."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")
