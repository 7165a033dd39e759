"""What a run is at: its files and what its control plane says, put together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_webrl.config import Config, ConfigError, RunConfig, read
from megatron_webrl.placement import place, ring_of
from megatron_webrl.ring.peek import peek
from megatron_webrl.status.live import Address, Answer, Observer, Tickets
from megatron_webrl.status.progress import Episodes, Progress, episodes, progress
from megatron_webrl.status.roles import RoleState, role_states
from megatron_webrl.tracking import events as journal
from megatron_webrl.tracking import summary
from megatron_webrl.tracking.events import Event
from megatron_webrl.tracking.newest import newest_checkpoint
from megatron_webrl.types import GOOD_OUTCOMES

LATEST = ("updates.jsonl", "episodes.jsonl", journal.FILE, "control.json", "config.yaml")
"""Files whose last change is a sign of life, beside the logs."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run."""

    latest: str | None  # path of the newest complete one
    at: float | None  # unix time at which it was complete
    failures: int  # of this job, up to the last update
    writing: bool  # whether one is under way, or was left by a crash


@dataclass(frozen=True)
class RingState:
    """The ring of a node, where it is on this machine."""

    node: int
    mib: float  # held
    capacity_mib: float
    records: int  # whole, neither trained nor dropped


@dataclass(frozen=True)
class Report:
    """Everything that `webrl status` shows. Times are unix times in seconds."""

    name: str
    folder: str
    state: str  # starting, running, ending, finished, stopped, interrupted, failed, or silent: no sign of life
    why: str  # of a failure or of silence; empty otherwise
    well: bool  # whether it runs, or ended in good order
    at: float  # of this report
    since: float  # start of the last job
    until: float | None  # its end
    last_sign: float  # newest change of its files
    slurm: str  # number of the last job, empty without Slurm
    hosts: list[str]  # by node, as far as they have started
    nodes: int
    control: str  # address of the control plane, and whether it answers
    version: int
    updates: int  # wanted in all
    expected_end: float | None
    progress: Progress | None
    episodes: Episodes | None
    tickets: Tickets | None
    checkpoints: Checkpoints
    rings: list[RingState]
    roles: list[RoleState]
    events: list[Event] = field(default_factory=list)  # of all jobs of this run
    places: dict[str, str] = field(default_factory=dict)  # where logs, metrics and summary are

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def find(run: str) -> Path:
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


def look(folder: Path, observer: Observer | None) -> Report:
    """Read the files of a run and, through `observer`, ask its control plane while the job has no outcome.

    Raises ConfigError for a configuration that this program does not understand.
    """
    config = read(folder / "config.yaml")
    config.run.directory = str(folder.parent)  # it may be relative to a folder that this process is not in
    events = journal.read(folder)
    job = journal.of_last_job(events)
    updates, ended = summary.read_updates(folder), _summary(folder)
    now, since = time.time(), _since(folder, job)
    address = Address.read(folder / "control.json")
    answer: Answer | str = "the job has not begun" if address is None else "not asked"
    names = _names(config, job)
    if ended is None and address is not None and observer is not None:
        answer = observer.ask(address, [name for name, _ in names])
        if isinstance(answer, str):
            ended = _summary(folder)  # it may have ended meanwhile
            job = journal.of_last_job(journal.read(folder))
    live = answer if isinstance(answer, Answer) else None
    last_sign = _last_sign(folder)
    state, why = _state(config, ended, answer, address, job, (now, since, last_sign))
    found = progress(updates, config.rollout.group_size, since)
    version, wanted = updates[-1]["version"] if updates else 0, config.trainer.updates
    running = state in ("starting", "running", "ending")
    return Report(
        name=config.run.name,
        folder=str(folder),
        state=state,
        why=why,
        well=running or state in GOOD_OUTCOMES,
        at=now,
        since=since,
        until=_until(folder, job) if ended is not None else None,
        last_sign=last_sign,
        slurm=next((event.slurm for event in reversed(job) if event.slurm), ""),
        hosts=_hosts(job),
        nodes=config.cluster.nodes,
        control="" if address is None or ended is not None else _control(address, answer),
        version=version,
        updates=wanted,
        expected_end=_expected_end(found, updates, wanted, now) if running and found else None,
        progress=found,
        episodes=episodes(updates, config.rollout.group_size, None if ended is None else ended["accounting"]),
        tickets=None if live is None else live.tickets,
        checkpoints=_checkpoints(folder, updates),
        rings=_rings(config, live, address) if ended is None else [],
        roles=role_states(folder, names, job, live, (state, why), config.run.lost_seconds),
        events=events,
        places=_places(config, folder),
    )


def _summary(folder: Path) -> dict[str, Any] | None:
    return summary.read(folder) if (folder / "summary.json").is_file() else None


def _since(folder: Path, job: Sequence[Event]) -> float:
    return job[0].at if job else (folder / "config.yaml").stat().st_mtime


def _expected_end(found: Progress, updates: Sequence[dict[str, Any]], wanted: int, now: float) -> float:
    """With updates as long as the last ones were; the one under way may take longer than that."""
    left, each = wanted - updates[-1]["version"], found.seconds_per_update
    return max(updates[-1]["finished_at"] + each * left, now + each * max(0, left - 1))


def _until(folder: Path, job: Sequence[Event]) -> float:
    ends = [event.at for event in job if (event.role, event.event) == (journal.JOB, journal.ENDED)]
    return ends[-1] if ends else (folder / "summary.json").stat().st_mtime


def _last_sign(folder: Path) -> float:
    paths = [folder / name for name in LATEST] + list((folder / "logs").rglob("*.log"))
    return max(path.stat().st_mtime for path in paths if path.is_file())


def _state(
    config: Config,
    ended: dict[str, Any] | None,
    answer: Answer | str,
    address: Address | None,
    job: Sequence[Event],
    times: tuple[float, float, float],
) -> tuple[str, str]:
    """(state, why)."""
    now, since, last_sign = times
    outcome = ended["outcome"] if ended is not None else None
    if outcome is None and isinstance(answer, Answer):
        if answer.outcome is None:
            why = "an early end was asked for" if answer.stopping else ""
            return "running" if answer.opened else "starting", why
        if answer.outcome in GOOD_OUTCOMES:
            return "ending", f"it has {answer.outcome}"
        outcome = answer.outcome
    if outcome is not None:
        kind, _, why = outcome.partition(": ")
        return (kind, why) if kind in (*GOOD_OUTCOMES, "failed") else _other(outcome)
    if address is None and now - max(since, last_sign) < config.run.start_seconds:
        return "starting", "its control plane is not up yet"
    host = next((event.host for event in job if event.host), "")
    where = f" ({host})" if host else ""
    hint = f"; only the machine of the job{where} reaches it" if address is not None and address.local else ""
    return "silent", f"{answer}{hint}"


def _other(outcome: str) -> tuple[str, str]:
    """Of an outcome such as "interrupted by SIGTERM"."""
    kind, _, why = outcome.partition(" ")
    return kind.rstrip(":"), why


def _names(config: Config, job: Sequence[Event]) -> list[tuple[str, int]]:
    """(role, node) of every process: those of the placement, and what has been started beside it.

    Of a node that has started something, only what it has started: an evaluation has no trainer.
    """
    started = {event.role: event.node for event in job if event.role != journal.JOB and event.event == journal.STARTED}
    begun = {(node, _kind(role)) for role, node in started.items()}
    alone = config.cluster.nodes == 1 and bool(started)
    placed = {
        process.name: process.node
        for process in place(config).processes
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


def _hosts(job: Sequence[Event]) -> list[str]:
    hosts = {event.node: event.host for event in job if event.role != journal.JOB and event.host}
    return [hosts[node] for node in sorted(hosts)]


def _control(address: Address, answer: Answer | str) -> str:
    where = f"{address.host}:{address.port}"
    return where if isinstance(answer, Answer) else f"{where} (no answer)"


def _checkpoints(folder: Path, updates: Sequence[dict[str, Any]]) -> Checkpoints:
    newest, folder = newest_checkpoint(folder), folder / "checkpoints"
    failures = int(updates[-1]["extra"].get("checkpoint/failed", 0)) if updates else 0
    return Checkpoints(
        str(newest) if newest else None,
        (folder / "latest").stat().st_mtime if newest else None,
        failures,
        any(folder.glob(".writing-*")),
    )


def _rings(config: Config, live: Answer | None, address: Address | None) -> list[RingState]:
    """Of the rings that are on this machine."""
    if config.cluster.nodes > 1:
        names: Iterable[tuple[int, str]] = ((node, ring_of(config, node)) for node in range(config.cluster.nodes))
    else:
        name = live.ring if live is not None else address.ring if address is not None else ""
        names = [(0, name)] if name else []
    found = [(node, usage) for node, name in names if (usage := peek(name)) is not None]
    return [RingState(node, u.bytes_held / 2**20, u.bytes_capacity / 2**20, u.records) for node, u in found]


def _places(config: Config, folder: Path) -> dict[str, str]:
    nodes = (folder / "logs" / "node-0").is_dir()
    places = {
        "logs": str(folder / "logs" / ("node-<number>/<process>.log" if nodes else "<process>.log")),
        "metrics": f"mlflow ui --backend-store-uri {config.tracking_uri}",
    }
    return places | ({"summary": str(path)} if (path := folder / "summary.json").is_file() else {})
