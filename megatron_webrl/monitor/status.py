"""The state of a run, from its files and its control service: `webrl status`, the page Run, and the end of a job."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.connection import ControlAddress
from megatron_webrl.monitor import roles as role_table
from megatron_webrl.monitor.control_probe import describe_tickets, query
from megatron_webrl.monitor.progress import Progress, expected_end, recent_progress, trained_episodes
from megatron_webrl.monitor.roles import CONTROL, RoleStatus, role_rows
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import evaluations, summary, tables
from megatron_webrl.track import events as journal
from megatron_webrl.track.events import ProcessEvent
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.tables import accounting_line
from megatron_webrl.track.upload import MLFLOW, TITLES, count_unsent
from megatron_webrl.types import CLEAN_JOB_OUTCOMES
from megatron_webrl.util.network import is_loopback
from megatron_webrl.util.text import count_noun, redact

ACTIVITY_FILES = ("updates.jsonl", "episodes.jsonl", journal.FILE, "control.json", "config.yaml")  # and the logs
ANSWER_SECONDS = 0.8  # limit of a status for the service; a busy one answers in less than half of it
SHOWN_EVENTS = 8
TAIL_BYTES = 8192
COLOURS = {"running": "green", "finished": "green", "failed": "bold red", "silent": "bold red", "interrupted": "yellow",
           "stopped": "yellow", "judge_budget_spent": "yellow", "unknown": "red"}  # fmt: skip
EVENT_COLUMNS = ("time", "node", "process", "event", "reason")
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \S+ (?:INFO|WARNING|ERROR|CRITICAL) [\w.]+: ")


@dataclass(frozen=True)
class RunStatus:
    """The state of a run's last job. Times are unix times in seconds."""

    state: str  # starting, running, ending, finished, stopped, interrupted, failed, or silent: no activity
    reason: str  # of a failure or of silence; empty otherwise
    healthy: bool  # whether it runs or has ended cleanly
    time: float  # of this status
    started_at: float
    ended_at: float | None
    version: int
    target_updates: int  # trainer.updates
    expected_end: float | None
    progress: Progress | None
    tickets: dict[str, int] | None  # claimed and limit, slots of the counter; in_progress: claimed and not closed
    roles: list[RoleStatus]
    events: list[ProcessEvent]  # without starts and, in a healthy run, without those of the job itself
    lines: dict[str, str]  # all of this and the run's files in words, by label

    def tables(self) -> dict[str, dict[str, Any]]:
        """`columns` and `rows` of the processes and of the last events, by title; only those that have rows."""
        last = self.events[-SHOWN_EVENTS:]
        found = {
            "processes": (role_table.COLUMNS, role_rows(self.roles)),
            f"last {count_noun(len(last), 'event')} of {len(self.events)}": (
                EVENT_COLUMNS,
                list(map(_event_row, last)),
            ),
        }
        return {title: {"columns": columns, "rows": rows} for title, (columns, rows) in found.items() if rows}


def find_run(run: str) -> Path:
    """The folder of a run: the path `run`, or the run of that name in runs/. Raises ConfigError."""
    directory = Path(RunConfig().directory)
    for folder in (Path(run), directory / run):
        if (folder / "config.yaml").is_file():
            return folder
    if (path := Path(run)).is_dir():
        raise ConfigError(f"RUN={run} has no config.yaml: it is not the folder of a run")
    if path.is_file():
        raise ConfigError(f"RUN={run} is a file; name the folder of a run, such as {path.parent}")
    names = sorted(path.parent.name for path in directory.glob("*/config.yaml"))
    known = f"; there are {', '.join(names)}" if names else ""
    raise ConfigError(f"RUN={run} is neither the folder of a run nor the name of one in {directory}/{known}")


def read_config(folder: Path) -> Config:
    """The configuration of a run. Raises ConfigError."""
    config = parse_config(folder / "config.yaml")
    config.run.directory = str(folder.parent)  # the stored path may be relative to another folder
    return config


def read_status(folder: Path, updates: Sequence[Mapping[str, Any]] | None = None) -> RunStatus:
    """Read a run's files, and query its control service unless the job has ended. Raises ConfigError.

    `updates`: those of updates.jsonl, if the caller has them.
    """
    updates = summary.read_updates(folder) if updates is None else updates
    job = _Job.read(folder)
    state, reason = job.state()
    running = state in ("starting", "running", "ending")
    progress = recent_progress(updates, job.config.rollout.group_size, job.started_at)
    now, target = time.time(), job.config.trainer.updates
    status = RunStatus(
        state=state,
        reason=reason,
        healthy=running or state in CLEAN_JOB_OUTCOMES,
        time=now,
        started_at=job.started_at,
        ended_at=job.ended_at,
        version=updates[-1]["version"] if updates else 0,
        target_updates=target,
        expected_end=expected_end(progress, updates[-1], target, now) if running and progress else None,
        progress=progress,
        tickets=None if job.live is None else job.live["tickets"],
        roles=[job.role(name, node, state, reason) for name, node in job.role_names()],
        events=[e for e in job.events if e.event != journal.STARTED and (e.role != journal.JOB or state == "failed")],
        lines={},
    )
    return replace(status, lines=job.lines(status, updates))


@dataclass(frozen=True)
class _Job:
    """What is known of the last job of a run."""

    folder: Path
    config: Config
    ended: Mapping[str, Any] | None  # summary.json, of a job that has ended
    live: Mapping[str, Any] | None  # the answer of its control service
    silence: str  # why there is no answer
    address: ControlAddress | None
    events: Sequence[ProcessEvent]
    number: int  # of the run's jobs

    @classmethod
    def read(cls, folder: Path) -> _Job:
        config, ended, path = read_config(folder), _summary(folder), folder / "control.json"
        address = ControlAddress.read(path)
        answer: dict[str, Any] | str = "the job has not started"
        if ended is None and address is not None:
            answer = query(path, ANSWER_SECONDS)
            if isinstance(answer, str):
                ended = _summary(folder)  # the job may have ended during the query
        events = journal.read_events(folder)
        number = sum((event.role, event.event) == (journal.JOB, journal.STARTED) for event in events)
        live, silence = (None, answer) if isinstance(answer, str) else (answer, "")
        return cls(folder, config, ended, live, silence, address, journal.events_of_last_job(events), number)

    @property
    def started_at(self) -> float:
        return self.events[0].time if self.events else (self.folder / "config.yaml").stat().st_mtime

    @property
    def ended_at(self) -> float | None:
        if self.ended is None:
            return None
        ends = [event.time for event in self.events if (event.role, event.event) == (journal.JOB, journal.ENDED)]
        return ends[-1] if ends else (self.folder / "summary.json").stat().st_mtime

    @property
    def last_activity_at(self) -> float:
        paths = [self.folder / name for name in ACTIVITY_FILES] + list((self.folder / "logs").rglob("*.log"))
        return max([self.started_at, *(path.stat().st_mtime for path in paths if path.is_file())])

    def state(self) -> tuple[str, str]:
        """(state, reason)."""
        outcome = self.ended["outcome"] if self.ended is not None else None
        if outcome is None and self.live is not None:
            if self.live["end"] is None:
                return "running" if self.live["tickets"] else "starting", "stop requested" if self.live["stop"] else ""
            outcome = self.live["end"]["outcome"]
            if outcome in CLEAN_JOB_OUTCOMES:
                return "ending", f"outcome: {outcome}"
        if outcome is not None:  # such as "finished", "failed: REASON", "interrupted by SIGTERM"
            kind, _, reason = outcome.partition(" ")
            return kind.rstrip(":"), reason
        if self.address is None and time.time() - self.last_activity_at < self.config.run.startup_timeout_seconds:
            return "starting", "the control service has not started yet"
        host = next((event.host for event in self.events if event.host), "")
        local = f"; it can be reached only from the job's machine{f' ({host})' if host else ''}"
        return "silent", f"{self.silence}{local if self.address is not None and is_loopback(self.address.host) else ''}"

    def role_names(self) -> list[tuple[str, int]]:
        """(role, node) of every process that was started or is placed.

        Where a role has started on a node, only started ones count; on one machine for all roles: no trainer if
        evaluating.
        """
        starts = [event for event in self.events if event.role != journal.JOB and event.event == journal.STARTED]
        started = {event.role: event.node for event in starts}
        begun = {(node, role.partition("-")[0]) for role, node in started.items()}
        placed = {
            process.name: process.node
            for process in place_processes(self.config).processes
            if not (self.config.cluster.nodes == 1 and started) and (process.node, process.role) not in begun
        }
        return sorted(({CONTROL: 0} | placed | started).items(), key=lambda item: _order(item[0]))

    def role(self, name: str, node: int, job_state: str, job_reason: str) -> RoleStatus:
        """The status of a process."""
        events = [event for event in self.events if event.role == name]
        last = next((e.event for e in reversed(events) if e.event in ("started", "restarted", "failed")), "")
        report = self.live["roles"].get(name) if self.live else None
        report = None if report is None or report["cleared"] else report
        age, status = (None, "") if report is None else (report["silent_seconds"], report["status"] or "")
        if last == journal.FAILED or (job_state == "failed" and job_reason.startswith((f"{name}:", f"{name} "))):
            state = "failed"
            reason = next((each.reason for each in reversed(events) if each.event == journal.FAILED), job_reason)
            status = _short_reason(reason, name)
        elif self.live is None:
            starting = job_state == "starting" and not last
            state = "unknown" if job_state == "silent" else "not started" if starting else "ended"
            status = "" if job_state in CLEAN_JOB_OUTCOMES else self._last_line(name, node, events)
        elif name == CONTROL:
            state = "running"
        elif age is not None:
            state = "silent" if age > self.config.run.heartbeat_timeout_seconds else "running"
        else:
            state = "starting" if last else "not started"
        restarts = sum(event.event == journal.RESTARTED for event in events)
        return RoleStatus(name, state, status, restarts, node, age)

    def _last_line(self, name: str, node: int, events: Sequence[ProcessEvent]) -> str:
        """The last line of a process's log that is not blank; empty without one."""
        logs = [self.folder / event.log for event in events if event.log]
        node_folder = self.folder / "logs" / f"node-{node}"
        path = logs[-1] if logs else (node_folder if node_folder.is_dir() else self.folder / "logs") / f"{name}.log"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")

    def lines(self, status: RunStatus, updates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Everything in words, by label."""
        folder, config = self.folder, self.config
        trains = any(role.name.startswith("trainer-") for role in status.roles)
        log = "node-<number>/<process>.log" if (folder / "logs" / "node-0").is_dir() else "<process>.log"
        sinks = (MLFLOW, *config.tracking.also) if self.ended is not None else ()
        unsent = {f"not in {TITLES[sink]}": count for sink in sinks if (count := count_unsent(folder, sink))}
        update = update_line(status.version, status.target_updates, status.expected_end, status.time)
        lines = {
            "run": f"{config.run.name}, {folder}",
            "state": self._state_line(status),
            "job": self._job_line(),
            "update": update if trains else "",
            "speed": str(status.progress or ""),
            "episodes": _episodes_line(updates, config.rollout.group_size, self.ended and self.ended["accounting"]),
            "groups": describe_tickets(status.tickets),
            "checkpoint": _checkpoint_line(folder, updates) if trains else "",
            "restarts": ", ".join(f"{role.name} {role.restarts}" for role in status.roles if role.restarts),
            "logs": str(folder / "logs" / log),
            "pages": f"webrl monitor {folder}",
            "metrics": f"MLflow at {redact(config.tracking_uri)}",
            **{label: f"{count} entries; send them with: webrl upload {folder}" for label, count in unsent.items()},
            "summary": str(folder / "summary.json") if self.ended is not None else "",
        }
        return {label: text for label, text in lines.items() if text}

    def _state_line(self, status: RunStatus) -> str:
        reason, now = f": {status.reason}" if status.reason else "", status.time
        if status.ended_at is not None:
            times = f"{_clock(status.started_at)} to {_clock(status.ended_at)}"
            return f"{status.state}{reason}; {times}, {duration(status.ended_at - status.started_at)}"
        if status.state == "silent":
            last = self.last_activity_at
            return f"no activity since {_clock(last)} ({duration(now - last)} ago){reason}"
        return f"{status.state} since {_clock(status.started_at)} ({duration(now - status.started_at)}){reason}"

    def _job_line(self) -> str:
        slurm = next((f"Slurm {event.slurm_job_id}, " for event in reversed(self.events) if event.slurm_job_id), "")
        hosts = {event.node: event.host for event in self.events if event.role != journal.JOB and event.host}
        names = list(dict.fromkeys(hosts[node] for node in sorted(hosts)))
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"
        number = f"; job {self.number} of this run" if self.number > 1 else ""
        return f"{slurm}{count_noun(self.config.cluster.nodes, 'node')}{f': {shown}' if shown else ''}{number}"


def _summary(folder: Path) -> dict[str, Any] | None:
    return summary.read_summary(folder) if (folder / "summary.json").is_file() else None


def _order(role: str) -> tuple[int, str, int, str]:
    kind, _, rest = role.partition("-")
    number, _, part = rest.partition(".")
    known = (CONTROL, "trainer", "rollout")
    return known.index(kind) if kind in known else len(known), kind, int(number) if number.isdigit() else 0, part


def _short_reason(reason: str, name: str) -> str:
    """A reason without what the tables show anyway: the role's name, the log's path, the prefix of its last line."""
    text = _LOGGED.sub("", reason.removeprefix(f"{name} ").removeprefix(f"{name}: "))
    return text[: text.rindex(" (log: ")] if text.endswith(")") and " (log: " in text else text


def update_line(version: int, target: int, end: float | None, now: float) -> str:
    """How far a job is; `end`: when it is expected to end, unix time."""
    left = "" if end is None or version >= target else f", {duration(end - now)} left"
    return f"{version} of {target}{left}"


def _episodes_line(updates: Sequence[Mapping[str, Any]], group_size: int, accounting: Mapping[str, Any] | None) -> str:
    if accounting is not None:
        return accounting_line(accounting).removeprefix("episodes: ")
    if not updates:
        return ""
    extra = updates[-1]["extra"]
    dropped = {name.partition("/")[2]: int(count) for name, count in extra.items() if name.startswith("dropped/")}
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(dropped.items()))
    trained = sum(trained_episodes(update, group_size) for update in updates)
    total = f"{sum(dropped.values())} dropped{f' ({reasons})' if reasons else ''}"
    return f"{trained} trained, {total}, up to the last update"


def _checkpoint_line(folder: Path, updates: Sequence[Mapping[str, Any]]) -> str:
    newest = find_latest_checkpoint(folder)
    failures = int(updates[-1]["extra"].get("checkpoint/failures", 0)) if updates else 0
    parts = [str(newest or "none yet"), f"{count_noun(failures, 'failure')}" if failures else ""]
    if newest is not None:
        parts[1:1] = [_clock((newest.parent / "latest").stat().st_mtime)]
    return ", ".join(filter(None, parts))


def _event_row(event: ProcessEvent) -> tuple[str, ...]:
    reason = _short_reason(event.reason, event.role) + (f" [{event.log}]" if event.log and event.reason else "")
    node = "" if event.role == journal.JOB else f"{event.node} {event.host}"
    return _clock(event.time), node, event.role, event.event, reason


def _clock(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time))


def duration(seconds: float) -> str:
    """A duration in its one or two largest units."""
    seconds = max(0, round(seconds))
    for size, unit, smaller, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {rest} {less}" if rest else "")
    return f"{seconds} s"


# -- for a terminal -------------------------------------------------------------------------------


def render_status(status: RunStatus) -> RenderableType:
    """The lines and the tables."""
    return Group(_grid(status), *(_table(title, **table) for title, table in status.tables().items()))


def _grid(status: RunStatus) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in status.lines.items():
        grid.add_row(label, Text(text, style=COLOURS.get(status.state, "") if label == "state" else ""))
    return grid


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold", ratio=1 if name == columns[-1] else None, no_wrap=name == "time")
    for row in rows:
        table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    return table


def print_final_report(folder: Path, outcome: str, console: Console) -> None:
    """Print evaluations, events and lines of a run whose job has ended: aligned on a terminal, unfolded in a log.

    Without a summary, as the file system of the run has failed, it prints the outcome and the newest checkpoint.
    """
    try:
        evaluation, status = summary.read_summary(folder)["evaluation"], read_status(folder)
    except OSError as error:
        console.print(_without_summary(folder, outcome, error), markup=False, highlight=False, soft_wrap=True)
        return
    if measured := [evaluation[name] for name in evaluations.NAMES if evaluation[name]]:
        console.print(tables.evaluation_table(measured))
        console.print(tables.EVALUATION_LEGEND, style="dim")
        for line in (*map(tables.format_rates, measured), *tables.gain_lines(evaluation)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for title, table in status.tables().items():
        if title != "processes":
            console.print(_table(title, **table))
    if console.is_terminal:
        console.print(_grid(status))
        return
    for label, text in status.lines.items():
        console.print(f"{label + ':':<11} {text}", markup=False, highlight=False, soft_wrap=True)


def _without_summary(folder: Path, outcome: str, error: OSError) -> str:
    try:
        checkpoint = str(find_latest_checkpoint(folder) or "none")
    except OSError as unknown:
        checkpoint = f"unknown ({unknown.strerror})"
    return f"{outcome}; newest checkpoint: {checkpoint}; no summary: {error}"
