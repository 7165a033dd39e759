"""Builds the report on a run from its files and its control service."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.address import ControlAddress
from megatron_webrl.monitor.status.control_probe import ControlStatus, TicketCounts, query
from megatron_webrl.monitor.status.progress import (
    EpisodeCounts,
    Progress,
    count_episodes,
    expected_end,
    recent_progress,
)
from megatron_webrl.monitor.status.role_status import RoleState, role_states
from megatron_webrl.placement.placement import place_processes, ring_name
from megatron_webrl.ring.ring import read_ring_usage
from megatron_webrl.track import events as journal
from megatron_webrl.track import summary
from megatron_webrl.track.events import ProcessEvent
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.mlflow_upload import count_unsent
from megatron_webrl.track.run_lock import STAGING_PREFIX
from megatron_webrl.types import CLEAN_JOB_OUTCOMES
from megatron_webrl.util.text import redact

ACTIVITY_FILES = ("updates.jsonl", "episodes.jsonl", journal.FILE, "control.json", "config.yaml")  # and the logs
ANSWER_SECONDS = 0.8  # limit of a report for the service; a busy one answers in less than half of it


@dataclass(frozen=True)
class CheckpointStatus:
    latest: str | None  # path of the newest complete one
    completed_at: float | None  # unix time of its completion
    failures: int  # in this job, up to the last update
    writing: bool  # whether one is being written, or was left unfinished by a crash


@dataclass(frozen=True)
class RingState:
    node: int
    used_mib: float
    capacity_mib: float
    records: int  # complete, neither trained nor dropped


@dataclass(frozen=True)
class RunReport:
    """Everything that `webrl status` shows. Times are unix times in seconds."""

    name: str
    folder: str
    state: str  # starting, running, ending, finished, stopped, interrupted, failed, or silent: no activity
    reason: str  # of a failure or of silence; empty otherwise
    healthy: bool  # whether it runs or has ended cleanly
    time: float  # of this report
    started_at: float  # of the last job
    ended_at: float | None  # of the last job
    last_activity_at: float  # newest change of its files
    slurm_job_id: str  # of the last job; empty without Slurm
    hosts: list[str]  # by node, of the nodes that have started
    nodes: int
    control_address: str  # of the control service, and whether it responds
    version: int
    target_updates: int  # trainer.updates
    expected_end: float | None
    progress: Progress | None
    episodes: EpisodeCounts | None
    tickets: TicketCounts | None
    checkpoints: CheckpointStatus
    rings: list[RingState]
    roles: list[RoleState]
    events: list[ProcessEvent] = field(default_factory=list)  # of all jobs of this run
    paths: dict[str, str] = field(default_factory=dict)  # of logs, metrics and summary

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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


def build_report(folder: Path) -> RunReport:
    """Read a run's files, and query its control service unless the job has ended. Raises ConfigError."""
    config = read_config(folder)
    events = journal.read_events(folder)
    job = journal.events_of_last_job(events)
    updates, ended = summary.read_updates(folder), _summary(folder)
    now, started_at = time.time(), _started_at(folder, job)
    address = ControlAddress.read(folder / "control.json")
    answer: ControlStatus | str = "the job has not started"
    names = _names(config, job)
    if ended is None and address is not None:
        answer = query(folder / "control.json", ANSWER_SECONDS)
        if isinstance(answer, str):
            ended = _summary(folder)  # the job may have ended during the query
            job = journal.events_of_last_job(journal.read_events(folder))
    live = answer if isinstance(answer, ControlStatus) else None
    last_activity_at = _last_activity_at(folder)
    state, reason = _state(config, ended, answer, address, job, (now, started_at, last_activity_at))
    progress = recent_progress(updates, config.rollout.group_size, started_at)
    version, target = updates[-1]["version"] if updates else 0, config.trainer.updates
    running = state in ("starting", "running", "ending")
    return RunReport(
        name=config.run.name,
        folder=str(folder),
        state=state,
        reason=reason,
        healthy=running or state in CLEAN_JOB_OUTCOMES,
        time=now,
        started_at=started_at,
        ended_at=_ended_at(folder, job) if ended is not None else None,
        last_activity_at=last_activity_at,
        slurm_job_id=next((event.slurm_job_id for event in reversed(job) if event.slurm_job_id), ""),
        hosts=_hosts(job),
        nodes=config.cluster.nodes,
        control_address="" if address is None or ended is not None else _control(address, answer),
        version=version,
        target_updates=target,
        expected_end=expected_end(progress, updates[-1], target, now) if running and progress else None,
        progress=progress,
        episodes=count_episodes(updates, config.rollout.group_size, None if ended is None else ended["accounting"]),
        tickets=None if live is None else live.tickets,
        checkpoints=_checkpoints(folder, updates),
        rings=_rings(config, live, address) if ended is None else [],
        roles=role_states(folder, names, job, live, (state, reason), config.run.heartbeat_timeout_seconds),
        events=events,
        paths=_paths(config, folder, ended is not None),
    )


def _summary(folder: Path) -> dict[str, Any] | None:
    return summary.read_summary(folder) if (folder / "summary.json").is_file() else None


def _started_at(folder: Path, job: Sequence[ProcessEvent]) -> float:
    return job[0].time if job else (folder / "config.yaml").stat().st_mtime


def _ended_at(folder: Path, job: Sequence[ProcessEvent]) -> float:
    ends = [event.time for event in job if (event.role, event.event) == (journal.JOB, journal.ENDED)]
    return ends[-1] if ends else (folder / "summary.json").stat().st_mtime


def _last_activity_at(folder: Path) -> float:
    paths = [folder / name for name in ACTIVITY_FILES] + list((folder / "logs").rglob("*.log"))
    return max(path.stat().st_mtime for path in paths if path.is_file())


def _state(
    config: Config,
    ended: dict[str, Any] | None,
    answer: ControlStatus | str,
    address: ControlAddress | None,
    job: Sequence[ProcessEvent],
    times: tuple[float, float, float],
) -> tuple[str, str]:
    """(state, reason); `times`: now, start of the job, last activity."""
    now, started_at, last_activity_at = times
    outcome = ended["outcome"] if ended is not None else None
    if outcome is None and isinstance(answer, ControlStatus):
        if answer.outcome is None:
            reason = "stop requested" if answer.stop_requested else ""
            return "running" if answer.accepts_tickets else "starting", reason
        if answer.outcome in CLEAN_JOB_OUTCOMES:
            return "ending", f"outcome: {answer.outcome}"
        outcome = answer.outcome
    if outcome is not None:
        kind, _, reason = outcome.partition(": ")
        return (kind, reason) if kind in (*CLEAN_JOB_OUTCOMES, "failed") else _split_outcome(outcome)
    if address is None and now - max(started_at, last_activity_at) < config.run.startup_timeout_seconds:
        return "starting", "the control service has not started yet"
    host = next((event.host for event in job if event.host), "")
    machine = f" ({host})" if host else ""
    local = address is not None and address.is_loopback
    hint = f"; it can be reached only from the job's machine{machine}" if local else ""
    return "silent", f"{answer}{hint}"


def _split_outcome(outcome: str) -> tuple[str, str]:
    """(state, reason) of an outcome such as "interrupted by SIGTERM"."""
    kind, _, reason = outcome.partition(" ")
    return kind.rstrip(":"), reason


def _names(config: Config, job: Sequence[ProcessEvent]) -> list[tuple[str, int]]:
    """(role, node) of every process that was started or is placed.

    Where a role has started on a node, only started ones count; on one machine for all roles: no trainer if evaluating.
    """
    started = {event.role: event.node for event in job if event.role != journal.JOB and event.event == journal.STARTED}
    begun = {(node, _kind(role)) for role, node in started.items()}
    one_machine = config.cluster.nodes == 1 and bool(started)
    placed = {
        process.name: process.node
        for process in place_processes(config).processes
        if not one_machine and (process.node, process.role) not in begun
    }
    nodes = {"control": 0} | placed | started
    return sorted(nodes.items(), key=lambda item: _order(item[0]))


def _kind(role: str) -> str:
    return role.partition("-")[0]


def _order(role: str) -> tuple[int, str, int, str]:
    kind, _, rest = role.partition("-")
    number, _, part = rest.partition(".")
    known = ("control", "trainer", "rollout")
    return known.index(kind) if kind in known else len(known), kind, int(number) if number.isdigit() else 0, part


def _hosts(job: Sequence[ProcessEvent]) -> list[str]:
    hosts = {event.node: event.host for event in job if event.role != journal.JOB and event.host}
    return [hosts[node] for node in sorted(hosts)]


def _control(address: ControlAddress, answer: ControlStatus | str) -> str:
    text = f"{address.host}:{address.port}"
    return text if isinstance(answer, ControlStatus) else f"{text} (no answer)"


def _checkpoints(folder: Path, updates: Sequence[dict[str, Any]]) -> CheckpointStatus:
    newest, folder = find_latest_checkpoint(folder), folder / "checkpoints"
    failures = int(updates[-1]["extra"].get("checkpoint/failures", 0)) if updates else 0
    return CheckpointStatus(
        str(newest) if newest else None,
        (newest.parent / "latest").stat().st_mtime if newest else None,
        failures,
        any(folder.glob(f"{STAGING_PREFIX}*/[0-9]*")),
    )


def _rings(config: Config, live: ControlStatus | None, address: ControlAddress | None) -> list[RingState]:
    """The rings on this machine."""
    if config.cluster.nodes > 1:
        names: Iterable[tuple[int, str]] = ((node, ring_name(config, node)) for node in range(config.cluster.nodes))
    else:
        name = live.job_id if live is not None else address.job_id if address is not None else ""
        names = [(0, name)] if name else []
    usages = [(node, usage) for node, name in names if (usage := read_ring_usage(name)) is not None]
    return [RingState(node, u.bytes_used / 2**20, u.bytes_capacity / 2**20, u.records) for node, u in usages]


def _paths(config: Config, folder: Path, ended: bool) -> dict[str, str]:
    by_node = (folder / "logs" / "node-0").is_dir()
    paths = {
        "logs": str(folder / "logs" / ("node-<number>/<process>.log" if by_node else "<process>.log")),
        "pages": f"webrl monitor {folder}",
        "metrics": f"webrl mlflow {folder}, of {redact(config.tracking_uri)}",
    }
    if ended and (count := count_unsent(folder)):
        paths["not in MLflow"] = f"{count} entries; send them with: webrl upload {folder}"
    return paths | ({"summary": str(path)} if (path := folder / "summary.json").is_file() else {})
