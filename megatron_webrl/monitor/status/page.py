"""Renders a report as text. Similar processes share a line, as in `webrl placement`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_webrl.monitor.status.progress import EpisodeCounts, Progress
from megatron_webrl.monitor.status.report import RingState, RunReport
from megatron_webrl.monitor.status.role_groups import RoleLine, group_roles
from megatron_webrl.monitor.status.role_status import RoleState, strip_reason
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.track import events as journal
from megatron_webrl.track.events import ProcessEvent
from megatron_webrl.track.tables import accounting_line
from megatron_webrl.util.text import count_noun

SHOWN_EVENTS = 8
COLOURS = {"running": "green", "finished": "green", "failed": "bold red", "silent": "bold red", "interrupted": "yellow",
           "stopped": "yellow", "judge_budget_spent": "yellow", "unknown": "red"}  # fmt: skip
LabelledLine = tuple[str, str]


def render_report(report: RunReport) -> RenderableType:
    """The whole report, for a terminal."""
    parts: list[RenderableType] = [_grid(report, report_lines(report)), Text(""), roles_table(report.roles)]
    if events := notable_events(report):
        parts += [Text("events, oldest first", style="bold"), events_table(events[-SHOWN_EVENTS:])]
    if len(events) > SHOWN_EVENTS:
        parts.append(Text(f"and {len(events) - SHOWN_EVENTS} earlier ones: --events", style="dim"))
    return Group(*parts)


def print_lines(report: RunReport, console: Console) -> None:
    """Print the labelled lines: aligned and folded on a terminal, unfolded in a log."""
    if console.is_terminal:
        console.print(_grid(report, report_lines(report)))
        return
    for key, text in report_lines(report):
        console.print(f"{key + ':' if key else '':<11} {text}", markup=False, highlight=False, soft_wrap=True)


def report_lines(report: RunReport) -> list[LabelledLine]:
    """The labelled lines about the job as a whole."""
    lines = [("run", f"{report.name}, {report.folder}"), ("state", _state(report)), ("job", _job(report))]
    if report.control_address:
        lines.append(("control", report.control_address))
    if trains := any(role.name.startswith("trainer-") for role in report.roles):
        lines.append(("update", _update(report)))
    if report.progress is not None:
        lines += _progress(report.progress)
    if report.episodes is not None:
        lines.append(("episodes", _episodes(report.episodes)))
    if report.tickets is not None:
        lines.append(("groups", str(report.tickets)))
    if trains:
        lines.append(("checkpoint", _checkpoint(report)))
    if report.rings:
        lines.append(("ring", _rings(report.rings)))
    if restarts := _restarts(report.roles):
        lines.append(("restarts", restarts))
    return lines + list(report.paths.items())


def roles_table(roles: Sequence[RoleState]) -> Table:
    """The processes, similar ones in one row."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in ("process", "nodes", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("beat\ns ago", justify="right")
    table.add_column("re-\nstarts", justify="right")
    table.add_column("status", overflow="fold", ratio=1)
    lines = [RoleLine(r.name, r.state, r.status_line, len(r.restarts), r.node, r.heartbeat_age_seconds) for r in roles]
    for group in group_roles(lines):
        age = group.oldest_heartbeat
        table.add_row(
            group.name,
            group.nodes,
            Text(group.state, style=COLOURS.get(group.state, "")),
            "-" if age is None else f"{age:.1f}",
            str(group.restarts or ""),
            Text(group.status),
        )
    return table


def events_table(events: Sequence[ProcessEvent]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in ("time", "node", "process", "event"):
        table.add_column(name, overflow="fold", no_wrap=name == "time")
    table.add_column("reason", overflow="fold", ratio=1)
    with_date = len({time.localtime(event.time)[:3] for event in events}) > 1
    for event in events:
        reason = strip_reason(event.reason, event.role) + (f" [{event.log}]" if event.log and event.reason else "")
        node = "" if event.role == journal.JOB else f"{event.node} {event.host}"
        table.add_row(_clock(event.time, with_date), node, event.role, event.event, Text(reason))
    return table


def notable_events(report: RunReport) -> list[ProcessEvent]:
    """Events of the last job but the starts of processes and, in a healthy run, the events of the job itself."""
    job = journal.events_of_last_job(report.events)
    return [each for each in job if each.event != journal.STARTED and (each.role != journal.JOB or not report.healthy)]


def _grid(report: RunReport, lines: Sequence[LabelledLine]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for key, text in lines:
        grid.add_row(key, Text(text, style=COLOURS.get(report.state, "") if key == "state" else ""))
    return grid


def _state(report: RunReport) -> str:
    reason = f": {report.reason}" if report.reason else ""
    if report.ended_at is not None:
        same = time.localtime(report.started_at)[:3] == time.localtime(report.ended_at)[:3]
        times = f"{_clock(report.started_at, True)} to {_clock(report.ended_at, not same)}"
        return f"{report.state}{reason}; {times}, {duration(report.ended_at - report.started_at)}"
    if report.state == "silent":
        age = duration(report.time - report.last_activity_at)
        return f"no activity since {_clock(report.last_activity_at, True)} ({age} ago){reason}"
    elapsed = duration(report.time - report.started_at)
    return f"{report.state} since {_clock(report.started_at, True)} ({elapsed}){reason}"


def _job(report: RunReport) -> str:
    slurm = f"Slurm {report.slurm_job_id}, " if report.slurm_job_id else ""
    hosts = f": {_hosts(report.hosts)}" if report.hosts else ""
    jobs = sum((event.role, event.event) == (journal.JOB, journal.STARTED) for event in report.events)
    number = f"; job {jobs} of this run" if jobs > 1 else ""
    return f"{slurm}{count_noun(report.nodes, 'node')}{hosts}{number}"


def _hosts(hosts: Sequence[str]) -> str:
    """Host names in Slurm's notation: n[01-04] a b."""
    names = []
    pairs = [(match[1], match[2]) for host in dict.fromkeys(hosts) if (match := re.fullmatch(r"(.*?)(\d*)", host))]
    for prefix, group in groupby(pairs, key=lambda pair: pair[0]):
        numbers = [number for _, number in group]
        width = len(numbers[0]) if any(number.startswith("0") for number in numbers) else 0
        if len(numbers) == 1 or not all(numbers) or (width and {len(number) for number in numbers} != {width}):
            names += [prefix + number for number in numbers]
        else:
            runs = re.split(r"(\d+)", format_cores([int(number) for number in numbers]))
            names.append(f"{prefix}[{''.join(run.zfill(width) if run.isdigit() else run for run in runs)}]")
    return " ".join(names)


def _update(report: RunReport) -> str:
    end = f"; expected end {_clock(report.expected_end, True)}" if report.expected_end is not None else ""
    window = report.progress.updates if report.progress is not None else 0
    means = f"; the lines below are means of the last {window}" if window > 1 else ""
    return f"{report.version} of {report.target_updates}{end}{means}"


def _progress(progress: Progress) -> list[LabelledLine]:
    speed = f"{progress.updates_per_hour:.1f} updates/h, {progress.episodes_per_hour:.0f} trained episodes/h"
    success = [] if progress.success is None else [("success", f"{progress.success:.1%} of sampled episodes")]
    return [
        ("speed", f"{speed}, {progress.tokens_per_second:.0f} tokens/s"),
        *success,
        ("staleness", f"{progress.staleness_mean:.1f} versions, at most {progress.staleness_max}"),
        ("waiting", f"the trainer waits for groups {progress.wait_fraction:.0%} of its time"),
    ]


def _episodes(counts: EpisodeCounts) -> str:
    if counts.finished is not None:
        return accounting_line(asdict(counts)).removeprefix("episodes: ")
    reasons = ", ".join(f"{name} {count}" for name, count in counts.dropped.items())
    dropped = f"{sum(counts.dropped.values())} dropped{f' ({reasons})' if reasons else ''}"
    return f"{counts.trained} trained, {dropped}, up to the last update"


def _checkpoint(report: RunReport) -> str:
    status = report.checkpoints
    parts = ["none yet"] if status.latest is None else [status.latest]
    if status.completed_at is not None and report.ended_at is None:
        parts.append(f"{duration(report.time - status.completed_at)} old")
    if status.writing:
        dead = report.ended_at is not None or report.state == "silent"
        parts.append("another left unfinished" if dead else "another in progress")
    if status.failures:
        parts.append(f"{count_noun(status.failures, 'failure')}")
    return ", ".join(parts)


def _rings(rings: Sequence[RingState]) -> str:
    """The fullest ring, and the number of others on this machine."""
    ring = max(rings, key=lambda each: each.used_mib)
    share, others = ring.used_mib / ring.capacity_mib, len(rings) - 1
    fill = f"{ring.used_mib:.1f} of {ring.capacity_mib:.0f} MiB ({share:.0%}), {count_noun(ring.records, 'episode')}"
    return f"node {ring.node}: {fill}" + (f"; {count_noun(others, 'other')} here, less full" if others else "")


def _restarts(roles: Sequence[RoleState]) -> str:
    counts = [(role.name, len(role.restarts)) for role in roles if role.restarts]
    shown = ", ".join(f"{name} {count}" for name, count in counts[:6])
    return shown + (f" and {len(counts) - 6} others" if len(counts) > 6 else "")


def _clock(unix_time: float, with_date: bool) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S", time.localtime(unix_time))


def duration(seconds: float) -> str:
    """A duration in its one or two largest units."""
    seconds = max(0, round(seconds))
    for size, unit, smaller, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {rest} {less}" if rest else "")
    return f"{seconds} s"
