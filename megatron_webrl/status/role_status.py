"""The state of each process of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.status.control_probe import ControlStatus
from megatron_webrl.tracking import events as journal
from megatron_webrl.tracking.events import ProcessEvent
from megatron_webrl.types import CLEAN_JOB_OUTCOMES

TAIL_BYTES = 8192
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \S+ (?:INFO|WARNING|ERROR|CRITICAL) [\w.]+: ")


@dataclass(frozen=True)
class ProcessRestart:
    """One time that a process was started again."""

    time: float  # unix time, seconds
    reason: str


@dataclass(frozen=True)
class RoleState:
    """One process."""

    name: str
    node: int
    host: str
    state: str  # running, starting, silent, failed, ended, not started; unknown where nothing answers
    status_line: str  # in its own words; of a job that nothing is heard of, the last line of its log
    heartbeat_age_seconds: float | None  # age of its last heartbeat, seconds
    started_at: float | None  # when it was started, the last time; unix time
    log: str
    restarts: list[ProcessRestart] = field(default_factory=list)


def role_states(
    folder: Path,
    names: Sequence[tuple[str, int]],
    job: Sequence[ProcessEvent],
    live: ControlStatus | None,
    state: tuple[str, str],
    lost: float,
) -> list[RoleState]:
    """Of all processes, given as (name, node). `job`: the events of the last job; `state`: what it is at, and why.

    lost: seconds without a heartbeat after which a process is silent.
    """
    by_role: dict[str, list[ProcessEvent]] = {}
    for event in job:
        by_role.setdefault(event.role, []).append(event)
    return [_role(folder, name, node, by_role.get(name, []), live, state, lost) for name, node in names]


def _role(
    folder: Path,
    name: str,
    node: int,
    events: Sequence[ProcessEvent],
    live: ControlStatus | None,
    job: tuple[str, str],
    lost: float,
) -> RoleState:
    starts = [event for event in events if event.event in (journal.STARTED, journal.RESTARTED)]
    path = _log(folder, name, node, events)
    beat = None if live is None else live.heartbeat_ages.get(name)
    state = _state(name, events, live, job, lost)
    again = any(event.event == journal.RESTARTED for event in events)
    doing = ""
    if live is not None and not (again and state == "starting"):  # what it said in its earlier life
        doing = live.status_lines.get(name, "")
    if state == "failed":
        told = next((event.reason for event in reversed(events) if event.event == journal.FAILED), job[1])
        doing = strip_reason(told, name)
    elif live is None and job[0] not in CLEAN_JOB_OUTCOMES:
        doing = _last_line(path)
    return RoleState(
        name, node, starts[-1].host if starts else "", state, doing, beat, starts[-1].time if starts else None, str(path),
        [ProcessRestart(event.time, strip_reason(event.reason, name)) for event in events if event.event == journal.RESTARTED],
    )  # fmt: skip


def _state(
    name: str, events: Sequence[ProcessEvent], live: ControlStatus | None, job: tuple[str, str], lost: float
) -> str:
    telling = (journal.STARTED, journal.RESTARTED, journal.FAILED)
    last = next((event.event for event in reversed(events) if event.event in telling), "")
    if last == journal.FAILED or (job[0] == "failed" and job[1].startswith((f"{name}:", f"{name} "))):
        return "failed"
    if live is None:
        if job[0] == "silent":
            return "unknown"
        return "not started" if job[0] == "starting" and not last else "ended"
    if name == "control":
        return "running"
    if name in live.heartbeat_ages:
        age = live.heartbeat_ages[name]
        return "silent" if age is not None and age > lost else "running"
    return "starting" if last or name in live.status_lines else "not started"


def strip_reason(reason: str, name: str) -> str:
    """A reason without what is told beside it anyway: whose it is, where the log is, and who logged its last words."""
    words = _LOGGED.sub("", reason.removeprefix(f"{name} ").removeprefix(f"{name}: "))
    return words[: words.rindex(" (log: ")] if words.endswith(")") and " (log: " in words else words


def _log(folder: Path, name: str, node: int, events: Iterable[ProcessEvent]) -> Path:
    if told := [event.log for event in events if event.log]:
        return folder / told[-1]
    of_node = folder / "logs" / f"node-{node}"
    return (of_node if of_node.is_dir() else folder / "logs") / f"{name}.log"


def _last_line(path: Path) -> str:
    """The last line of a log that says something; empty without one."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")
