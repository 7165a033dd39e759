"""What a run is at: its files and what its control plane says, put together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_webrl.cluster.placement import place_processes, ring_name
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.ring.ring_usage import read_ring_usage
from megatron_webrl.status.control_probe import ControlAddress, ControlProbe, ControlStatus, TicketCounts
from megatron_webrl.status.progress import EpisodeCounts, Progress, count_episodes, recent_progress
from megatron_webrl.status.role_status import RoleState, role_states
from megatron_webrl.tracking import events as journal
from megatron_webrl.tracking import summary
from megatron_webrl.tracking.events import ProcessEvent
from megatron_webrl.tracking.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.types import CLEAN_JOB_OUTCOMES

ACTIVITY_FILES = ("updates.jsonl", "episodes.jsonl", journal.FILE, "control.json", "config.yaml")
"""Files whose last change is a sign of life, beside the logs."""


@dataclass(frozen=True)
class CheckpointStatus:
    """The checkpoints of a run."""

    latest: str | None  # path of the newest complete one
    completed_at: float | None  # unix time at which it was complete
    failures: int  # of this job, up to the last update
    writing: bool  # whether one is under way, or was left by a crash


@dataclass(frozen=True)
class RingState:
    """The ring of a node, where it is on this machine."""

    node: int
    used_mib: float  # held
    capacity_mib: float
    records: int  # whole, neither trained nor dropped


@dataclass(frozen=True)
class RunReport:
    """Everything that `webrl status` shows. Times are unix times in seconds."""

    name: str
    folder: str
    state: str  # starting, running, ending, finished, stopped, interrupted, failed, or silent: no sign of life
    reason: str  # of a failure or of silence; empty otherwise
    healthy: bool  # whether it runs, or ended in good order
    time: float  # of this report
    started_at: float  # start of the last job
    ended_at: float | None  # its end
    last_activity_at: float  # newest change of its files
    slurm_job_id: str  # number of the last job, empty without Slurm
    hosts: list[str]  # by node, as far as they have started
    nodes: int
    control_address: str  # address of the control plane, and whether it answers
    version: int
    target_updates: int  # wanted in all
    expected_end: float | None
    progress: Progress | None
    episodes: EpisodeCounts | None
    tickets: TicketCounts | None
    checkpoints: CheckpointStatus
    rings: list[RingState]
    roles: list[RoleState]
    events: list[ProcessEvent] = field(default_factory=list)  # of all jobs of this run
    paths: dict[str, str] = field(default_factory=dict)  # where logs, metrics and summary are

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def find_run(run: str) -> Path:
    """The folder of a run: `run` itself, or the run of that name in the usual folder. Raises ConfigError."""
    usual = Path(RunConfig().directory)
    for folder in (Path(run), usual / run):
        if (folder / "config.yaml").is_file():
            return folder
    if (path := Path(run)).is_dir():
        raise ConfigError(f"RUN={run} holds no config.yaml: it is not the folder of a run")
    if path.is_file():
        raise ConfigError(f"RUN={run} is a file; name the folder of a run, such as {path.parent}")
    there = sorted(path.parent.name for path in usual.glob("*/config.yaml"))
    known = f"; there are {', '.join(there)}" if there else ""
    raise ConfigError(f"RUN={run} is neither the folder of a run nor the name of one in {usual}/{known}")


def build_report(folder: Path, observer: ControlProbe | None) -> RunReport:
    """Read the files of a run and, through `observer`, ask its control plane while the job has no outcome.

    Raises ConfigError for a configuration that this program does not understand.
    """
    config = parse_config(folder / "config.yaml")
    config.run.directory = str(folder.parent)  # it may be relative to a folder that this process is not in
    events = journal.read_events(folder)
    job = journal.events_of_last_job(events)
    updates, ended = summary.read_updates(folder), _summary(folder)
    now, since = time.time(), _since(folder, job)
    address = ControlAddress.read(folder / "control.json")
    answer: ControlStatus | str = "the job has not begun" if address is None else "not asked"
    names = _names(config, job)
    if ended is None and address is not None and observer is not None:
        answer = observer.query(address, [name for name, _ in names])
        if isinstance(answer, str):
            ended = _summary(folder)  # it may have ended meanwhile
            job = journal.events_of_last_job(journal.read_events(folder))
    live = answer if isinstance(answer, ControlStatus) else None
    last_sign = _last_sign(folder)
    state, why = _state(config, ended, answer, address, job, (now, since, last_sign))
    found = recent_progress(updates, config.rollout.group_size, since)
    version, wanted = updates[-1]["version"] if updates else 0, config.trainer.updates
    running = state in ("starting", "running", "ending")
    return RunReport(
        name=config.run.name,
        folder=str(folder),
        state=state,
        reason=why,
        healthy=running or state in CLEAN_JOB_OUTCOMES,
        time=now,
        started_at=since,
        ended_at=_until(folder, job) if ended is not None else None,
        last_activity_at=last_sign,
        slurm_job_id=next((event.slurm_job_id for event in reversed(job) if event.slurm_job_id), ""),
        hosts=_hosts(job),
        nodes=config.cluster.nodes,
        control_address="" if address is None or ended is not None else _control(address, answer),
        version=version,
        target_updates=wanted,
        expected_end=_expected_end(found, updates, wanted, now) if running and found else None,
        progress=found,
        episodes=count_episodes(updates, config.rollout.group_size, None if ended is None else ended["accounting"]),
        tickets=None if live is None else live.tickets,
        checkpoints=_checkpoints(folder, updates),
        rings=_rings(config, live, address) if ended is None else [],
        roles=role_states(folder, names, job, live, (state, why), config.run.heartbeat_timeout_seconds),
        events=events,
        paths=_places(config, folder),
    )


def _summary(folder: Path) -> dict[str, Any] | None:
    return summary.read_summary(folder) if (folder / "summary.json").is_file() else None


def _since(folder: Path, job: Sequence[ProcessEvent]) -> float:
    return job[0].time if job else (folder / "config.yaml").stat().st_mtime


def _expected_end(found: Progress, updates: Sequence[dict[str, Any]], wanted: int, now: float) -> float:
    """With updates as long as the last ones were; the one under way may take longer than that."""
    left, each = wanted - updates[-1]["version"], found.seconds_per_update
    return max(updates[-1]["finished_at"] + each * left, now + each * max(0, left - 1))


def _until(folder: Path, job: Sequence[ProcessEvent]) -> float:
    ends = [event.time for event in job if (event.role, event.event) == (journal.JOB, journal.ENDED)]
    return ends[-1] if ends else (folder / "summary.json").stat().st_mtime


def _last_sign(folder: Path) -> float:
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
    """(state, why)."""
    now, since, last_sign = times
    outcome = ended["outcome"] if ended is not None else None
    if outcome is None and isinstance(answer, ControlStatus):
        if answer.outcome is None:
            why = "an early end was asked for" if answer.stop_requested else ""
            return "running" if answer.accepts_tickets else "starting", why
        if answer.outcome in CLEAN_JOB_OUTCOMES:
            return "ending", f"it has {answer.outcome}"
        outcome = answer.outcome
    if outcome is not None:
        kind, _, why = outcome.partition(": ")
        return (kind, why) if kind in (*CLEAN_JOB_OUTCOMES, "failed") else _other(outcome)
    if address is None and now - max(since, last_sign) < config.run.startup_timeout_seconds:
        return "starting", "its control plane is not up yet"
    host = next((event.host for event in job if event.host), "")
    where = f" ({host})" if host else ""
    hint = f"; only the machine of the job{where} reaches it" if address is not None and address.is_loopback else ""
    return "silent", f"{answer}{hint}"


def _other(outcome: str) -> tuple[str, str]:
    """Of an outcome such as "interrupted by SIGTERM"."""
    kind, _, why = outcome.partition(" ")
    return kind.rstrip(":"), why


def _names(config: Config, job: Sequence[ProcessEvent]) -> list[tuple[str, int]]:
    """(role, node) of every process: those of the placement, and what has been started beside it.

    Of a node that has started something, only what it has started: an evaluation has no trainer.
    """
    started = {event.role: event.node for event in job if event.role != journal.JOB and event.event == journal.STARTED}
    begun = {(node, _kind(role)) for role, node in started.items()}
    alone = config.cluster.nodes == 1 and bool(started)
    placed = {
        process.name: process.node
        for process in place_processes(config).processes
        if not alone and (process.node, process.role) not in begun
    }
    found = {"control": 0} | placed | started
    return sorted(found.items(), key=lambda item: _order(item[0]))


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
    where = f"{address.host}:{address.port}"
    return where if isinstance(answer, ControlStatus) else f"{where} (no answer)"


def _checkpoints(folder: Path, updates: Sequence[dict[str, Any]]) -> CheckpointStatus:
    newest, folder = find_latest_checkpoint(folder), folder / "checkpoints"
    failures = int(updates[-1]["extra"].get("checkpoint/failures", 0)) if updates else 0
    return CheckpointStatus(
        str(newest) if newest else None,
        (folder / "latest").stat().st_mtime if newest else None,
        failures,
        any(folder.glob(".writing-*")),
    )


def _rings(config: Config, live: ControlStatus | None, address: ControlAddress | None) -> list[RingState]:
    """Of the rings that are on this machine."""
    if config.cluster.nodes > 1:
        names: Iterable[tuple[int, str]] = ((node, ring_name(config, node)) for node in range(config.cluster.nodes))
    else:
        name = live.job_id if live is not None else address.job_id if address is not None else ""
        names = [(0, name)] if name else []
    found = [(node, usage) for node, name in names if (usage := read_ring_usage(name)) is not None]
    return [RingState(node, u.bytes_used / 2**20, u.bytes_capacity / 2**20, u.records) for node, u in found]


def _places(config: Config, folder: Path) -> dict[str, str]:
    nodes = (folder / "logs" / "node-0").is_dir()
    places = {
        "logs": str(folder / "logs" / ("node-<number>/<process>.log" if nodes else "<process>.log")),
        "metrics": f"mlflow ui --backend-store-uri {config.tracking_uri}",
    }
    return places | ({"summary": str(path)} if (path := folder / "summary.json").is_file() else {})
