"""A report as a person reads it. Processes that are alike share a line, as in `webrl placement`."""

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

from megatron_webrl.cluster.cores import format_cores
from megatron_webrl.status.progress import EpisodeCounts, Progress
from megatron_webrl.status.report import RingState, RunReport
from megatron_webrl.status.role_status import RoleState, strip_reason
from megatron_webrl.tracking import events as journal
from megatron_webrl.tracking.dashboard import accounting_line
from megatron_webrl.tracking.events import ProcessEvent

SHOWN_EVENTS = 8
COLOURS = {"running": "green", "finished": "green", "failed": "bold red", "silent": "bold red", "interrupted": "yellow",
           "stopped": "yellow", "unknown": "red"}  # fmt: skip
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

LabelledLine = tuple[str, str]


def render_report(report: RunReport) -> RenderableType:
    """The whole report, for a terminal."""
    parts: list[RenderableType] = [_grid(report, report_lines(report)), Text(""), roles_table(report.roles)]
    if happened := notable_events(report):
        parts += [Text("what happened, the last at the end", style="bold"), events_table(happened[-SHOWN_EVENTS:])]
    if len(happened) > SHOWN_EVENTS:
        parts.append(Text(f"and {len(happened) - SHOWN_EVENTS} before: --events", style="dim"))
    return Group(*parts)


def print_lines(report: RunReport, console: Console) -> None:
    """The lines alone: on a terminal aligned and folded, in a log each on one line, however long."""
    if console.is_terminal:
        console.print(_grid(report, report_lines(report)))
        return
    for key, text in report_lines(report):
        console.print(f"{key + ':' if key else '':<11} {text}", markup=False, highlight=False, soft_wrap=True)


def report_lines(report: RunReport) -> list[LabelledLine]:
    """(what, in words) of the job as a whole."""
    found = [("run", f"{report.name}, {report.folder}"), ("state", _state(report)), ("job", _job(report))]
    if report.control_address:
        found.append(("control", report.control_address))
    if trains := any(role.name.startswith("trainer-") for role in report.roles):
        found.append(("update", _update(report)))
    if report.progress is not None:
        found += _progress(report.progress)
    if report.episodes is not None:
        found.append(("episodes", _episodes(report.episodes)))
    if report.tickets is not None:
        tickets = report.tickets
        found.append(
            ("groups", f"{tickets.in_progress} being played, {tickets.claimed} begun of {tickets.limit} allowed")
        )
    if trains:
        found.append(("checkpoint", _checkpoint(report)))
    if report.rings:
        found.append(("ring", _rings(report.rings)))
    if restarts := _restarts(report.roles):
        found.append(("restarts", restarts))
    return found + list(report.paths.items())


def roles_table(roles: Sequence[RoleState]) -> Table:
    """The processes, those that are alike in one line."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in ("process", "nodes", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("beat\ns ago", justify="right")
    table.add_column("re-\nstarts", justify="right")
    table.add_column("at", overflow="fold", ratio=1)
    for alike in _alike(roles):
        first, beats = (
            alike[0],
            [role.heartbeat_age_seconds for role in alike if role.heartbeat_age_seconds is not None],
        )
        numbers = [int(number) for role in alike if (number := _split(role.name)[1]).isdigit()]
        table.add_row(
            f"{_split(first.name)[0]} {format_cores(numbers)}" if numbers else first.name,
            format_cores(sorted({role.node for role in alike})),
            Text(first.state, style=COLOURS.get(first.state, "")),
            f"{max(beats):.1f}" if beats else "-",
            str(len(first.restarts) or ""),
            Text(_merged([role.status_line for role in alike])),
        )
    return table


def events_table(events: Sequence[ProcessEvent]) -> Table:
    """Events, a row each."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in ("time", "node", "process", "event"):
        table.add_column(name, overflow="fold", no_wrap=name == "time")
    table.add_column("reason", overflow="fold", ratio=1)
    day = len({time.localtime(event.time)[:3] for event in events}) > 1
    for event in events:
        reason = strip_reason(event.reason, event.role) + (f" [{event.log}]" if event.log and event.reason else "")
        node = "" if event.role == journal.JOB else f"{event.node} {event.host}"
        table.add_row(_clock(event.time, day), node, event.role, event.event, Text(reason))
    return table


def notable_events(report: RunReport) -> list[ProcessEvent]:
    """Of the last job: what is neither the start of a process nor the end of a job that ended well."""
    job = journal.events_of_last_job(report.events)
    return [
        event for event in job if event.event != journal.STARTED and (event.role != journal.JOB or not report.healthy)
    ]


def _grid(report: RunReport, shown: Sequence[LabelledLine]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for key, text in shown:
        grid.add_row(key, Text(text, style=COLOURS.get(report.state, "") if key == "state" else ""))
    return grid


def _state(report: RunReport) -> str:
    why = f": {report.reason}" if report.reason else ""
    if report.ended_at is not None:
        same = time.localtime(report.started_at)[:3] == time.localtime(report.ended_at)[:3]
        times = f"{_clock(report.started_at, True)} to {_clock(report.ended_at, not same)}"
        return f"{report.state}{why}; {times}, {_span(report.ended_at - report.started_at)}"
    if report.state == "silent":
        ago = _span(report.time - report.last_activity_at)
        return f"no sign of life since {_clock(report.last_activity_at, True)} ({ago} ago){why}"
    return f"{report.state} since {_clock(report.started_at, True)} ({_span(report.time - report.started_at)}){why}"


def _job(report: RunReport) -> str:
    slurm = f"Slurm {report.slurm_job_id}, " if report.slurm_job_id else ""
    hosts = f": {_hosts(report.hosts)}" if report.hosts else ""
    jobs = sum((event.role, event.event) == (journal.JOB, journal.STARTED) for event in report.events)
    again = f"; the {_ordinal(jobs)} of this run" if jobs > 1 else ""
    return f"{slurm}{_count(report.nodes, 'node')}{hosts}{again}"


def _hosts(hosts: Sequence[str]) -> str:
    """Names of hosts as Slurm writes them: n[01-04] a b."""
    found = []
    pairs = [(match[1], match[2]) for host in dict.fromkeys(hosts) if (match := re.fullmatch(r"(.*?)(\d*)", host))]
    for prefix, group in groupby(pairs, key=lambda pair: pair[0]):
        numbers = [number for _, number in group]
        width = len(numbers[0]) if any(number.startswith("0") for number in numbers) else 0
        if len(numbers) == 1 or not all(numbers) or (width and {len(number) for number in numbers} != {width}):
            found += [prefix + number for number in numbers]
        else:
            runs = re.split(r"(\d+)", format_cores([int(number) for number in numbers]))
            found.append(f"{prefix}[{''.join(run.zfill(width) if run.isdigit() else run for run in runs)}]")
    return " ".join(found)


def _update(report: RunReport) -> str:
    end = f"; expected end {_clock(report.expected_end, True)}" if report.expected_end is not None else ""
    window = report.progress.updates if report.progress is not None else 0
    means = f"; figures: means of the last {window}" if window > 1 else ""
    return f"{report.version} of {report.target_updates}{end}{means}"


def _progress(found: Progress) -> list[LabelledLine]:
    speed = f"{found.updates_per_hour:.1f} updates/h, {found.episodes_per_hour:.0f} trained episodes/h"
    success = [] if found.success is None else [("success", f"{found.success:.1%} of sampled episodes")]
    return [
        ("speed", f"{speed}, {found.tokens_per_second:.0f} tokens/s"),
        *success,
        ("staleness", f"{found.staleness_mean:.1f} versions, at most {found.staleness_max}"),
        ("waiting", f"the trainer waits for groups {found.wait_fraction:.0%} of its time"),
    ]


def _episodes(found: EpisodeCounts) -> str:
    if found.finished is not None:
        return accounting_line(asdict(found)).removeprefix("episodes: ")
    reasons = ", ".join(f"{name} {count}" for name, count in found.dropped.items())
    dropped = f"{sum(found.dropped.values())} dropped{f' ({reasons})' if reasons else ''}"
    return f"{found.trained} trained, {dropped}, up to the last update"


def _checkpoint(report: RunReport) -> str:
    found = report.checkpoints
    parts = ["none yet"] if found.latest is None else [found.latest]
    if found.completed_at is not None and report.ended_at is None:
        parts.append(f"{_span(report.time - found.completed_at)} old")
    if found.writing:
        dead = report.ended_at is not None or report.state == "silent"
        parts.append("another left unfinished" if dead else "another under way")
    if found.failures:
        parts.append(f"{_count(found.failures, 'failure')}")
    return ", ".join(parts)


def _rings(rings: Sequence[RingState]) -> str:
    """The fullest one, and how many others are on this machine."""
    ring = max(rings, key=lambda each: each.used_mib)
    share, others = ring.used_mib / ring.capacity_mib, len(rings) - 1
    fill = f"{ring.used_mib:.1f} of {ring.capacity_mib:.0f} MiB ({share:.0%}), {_count(ring.records, 'episode')}"
    return f"node {ring.node}: {fill}" + (f"; {_count(others, 'other')} here, less full" if others else "")


def _restarts(roles: Sequence[RoleState]) -> str:
    counts = [(role.name, len(role.restarts)) for role in roles if role.restarts]
    shown = ", ".join(f"{name} {count}" for name, count in counts[:6])
    return shown + (f" and {len(counts) - 6} others" if len(counts) > 6 else "")


def _alike(roles: Sequence[RoleState]) -> list[list[RoleState]]:
    """Processes that differ by their place and by numbers in what they say alone."""
    kinds: dict[tuple[object, ...], list[RoleState]] = {}
    for role in roles:
        kind = (_split(role.name)[0], role.state, len(role.restarts), _NUMBER.sub("#", role.status_line))
        kinds.setdefault(kind, []).append(role)
    return list(kinds.values())


def _split(name: str) -> tuple[str, str]:
    """rollout-3 as (rollout, 3), rollout-3.follower-1 as (rollout follower-1, 3)."""
    process, _, part = name.partition(".")
    kind, _, number = process.rpartition("-")
    return (f"{kind} {part}".rstrip(), number) if kind and number.isdigit() else (name, "")


def _merged(texts: Sequence[str]) -> str:
    """Texts that differ by numbers as one, with the smallest and the largest of each number."""
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    spans = iter([_between(sorted(set(column), key=float)) for column in columns])
    return _NUMBER.sub(lambda _: next(spans), texts[0])


def _between(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _clock(at: float, day: bool) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S", time.localtime(at))


def _span(seconds: float) -> str:
    """A time span in the one or two units that matter."""
    seconds = max(0, round(seconds))
    for size, unit, smaller, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {rest} {less}" if rest else "")
    return f"{seconds} s"


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
