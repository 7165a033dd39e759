"""The timeline of a run: the spans of all nodes by their times of day, and what bounded an update.

Update n lasts from the end of update n - 1 to its own, as `finished_at` in updates.jsonl.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track.timeline import FOLDER
from megatron_webrl.util import history

MARGIN_SECONDS = 900.0  # around a window, for spans that overlap it
WAIT, TRAIN, SYNC, OTHER = "wait for groups", "train", "weight exchange", "other"
PARTS = (WAIT, TRAIN, SYNC, "checkpoint", "log and account")
TRAINING_PARTS = ("pack", "log-probabilities", "forward and backward", "optimizer")
ACTIVITIES = {
    "generate": "engine",
    "act": "browser",
    "reset": "browser",
    "wait for browser": "no free browser",
    "judge": "judge",
}
"""What an episode waits for in a span."""
Window = tuple[float, float]  # from and to, unix seconds


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One span of a process. Times are unix seconds."""

    name: str
    track: str
    start: float
    end: float
    facts: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def ticket(self) -> tuple[int, int]:
        """Restart epoch and ticket, of a ticket or an episode."""
        return self.facts["epoch"], self.facts["ticket"]

    def within(self, window: Window) -> float:
        """Seconds of the span within a window."""
        return max(0.0, min(self.end, window[1]) - max(self.start, window[0]))


@dataclass(frozen=True)
class ProcessTimeline:
    """What one process did. A role that was restarted has several."""

    role: str
    node: int
    host: str
    pid: int
    spans: tuple[TimelineSpan, ...]  # by start; of spans that start together, the outer one first

    def named(self, name: str) -> list[TimelineSpan]:
        return [span for span in self.spans if span.name == name]

    def within(self, window: Window) -> list[TimelineSpan]:
        """The spans that overlap a window."""
        return [span for span in self.spans if span.start < window[1] and span.end > window[0]]


def read_timeline(folder: Path, role: str = "", window: Window | None = None) -> list[ProcessTimeline]:
    """The processes of a run, or of a role, by role and start. Raises ConfigError if the run has no timeline.

    `window`: spans that ended MARGIN_SECONDS before it or began as long after it are left out, to save memory.
    """
    spans: dict[tuple[str, int, str, int], list[TimelineSpan]] = {}  # by process
    zeros: dict[str, float] = {}  # unix time at the zero of a machine's clock, by its first process
    first, last = (window[0] - MARGIN_SECONDS, window[1] + MARGIN_SECONDS) if window else (-math.inf, math.inf)
    for path in sorted((folder / FOLDER).glob(f"{role}.?.jsonl" if role else "*.jsonl")):
        for line in history.read(path) if path.stat().st_mtime >= first else ():
            zero = zeros.setdefault(line["clock"], line["unix"] - line["monotonic"])
            found = spans.setdefault((line["role"], line["node"], line["host"], line["pid"]), [])
            for name, track, start, end, facts in line["spans"]:
                span = TimelineSpan(name, track, zero + start / 1e6, zero + end / 1e6, facts)
                if span.end > first and span.start < last:
                    found.append(span)
    if not spans:
        raise ConfigError(f"{folder} has no timeline: start a run with tracking.timeline=true")
    return [
        ProcessTimeline(*process, tuple(sorted(spans[process], key=lambda span: (span.start, -span.end))))
        for process in sorted(spans, key=lambda process: _numbered(process[0]))
    ]


def _numbered(role: str) -> tuple[str, int]:
    name, _, number = role.rpartition("-")
    return (name, int(number)) if number.isdigit() else (role, 0)


# -- what bounded an update -----------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateBound:
    """Where the time of an update went: seconds by name."""

    version: int
    seconds: float
    trainer: dict[str, float]  # of the trainer's first rank: PARTS and OTHER; their sum is `seconds`
    waiting: dict[str, float]  # of WAIT, by what the last episode of the last group did meanwhile; the sum is WAIT's
    training: dict[str, float]  # of TRAIN; the sum is TRAIN's
    engines: dict[str, float]  # mean over engines: with a request, paused for weights, with room and no ticket

    def rows(self) -> list[tuple[str, float, float, int]]:
        """The table: label, seconds, share of the update, depth: 1 for a part of the row before it of depth 0."""
        named = []
        for name, seconds in self.trainer.items():
            named.append((f"trainer: {name}", seconds, 0))
            parts = {WAIT: self.waiting, TRAIN: self.training}.get(name, {})
            named += [(part, each, 1) for part, each in parts.items() if each > 0]
        named += [(f"engines: {name}", seconds, 0) for name, seconds in self.engines.items()]
        return [(label, seconds, seconds / self.seconds, depth) for label, seconds, depth in named]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"rows": self.rows()}


def read_update(folder: Path, version: int | None = None) -> tuple[UpdateBound, Window, list[ProcessTimeline]]:
    """An update of a run, by default the last one, its window, and what all processes did in it. Raises ConfigError."""
    updates = find_updates(read_timeline(folder, role="trainer-0"))
    version = max(updates) if version is None else version
    if version not in updates:
        raise ConfigError(
            f"update {version} is not in the timeline, which has updates {min(updates)} to {max(updates)}"
        )
    _, update = updates[version]
    window = update.start, update.end
    processes = read_timeline(folder, window=window)
    return update_bound(processes, find_updates(processes)[version]), window, processes


def find_updates(processes: Sequence[ProcessTimeline]) -> dict[int, tuple[ProcessTimeline, TimelineSpan]]:
    """By version: the first rank that made it, of several attempts the last, and the span. Raises ConfigError."""
    found = {
        span.facts["version"]: (process, span)
        for process in processes
        if process.role == "trainer-0"
        for span in process.named("update")
    }
    if not found:
        raise ConfigError("the timeline has no complete update yet")
    return found


def update_bound(processes: Sequence[ProcessTimeline], update_of: tuple[ProcessTimeline, TimelineSpan]) -> UpdateBound:
    """What bounded an update of find_updates. `processes`: at least its trainer and the workers."""
    trainer, update = update_of
    window, workers = (update.start, update.end), [each for each in processes if each.role.startswith("rollout-")]
    spans = [span for span in trainer.within(window) if span.track == "" and span is not update]
    waits = [span for span in spans if span.name == WAIT]

    def seconds_of(name: str) -> float:
        chosen = [span for span in spans if span.name == name]
        if name in PARTS and name != WAIT:  # what is done within a wait counts as waiting
            chosen = [span for span in chosen if not any(_encloses(wait, span) for wait in waits)]
        return sum(span.within(window) for span in chosen)

    parts = {name: seconds_of(name) for name in PARTS}
    training = {name: seconds_of(name) for name in TRAINING_PARTS}
    wait = max(waits, key=lambda span: span.seconds, default=None)
    waiting = {} if wait is None else _waited_for(workers, update, (wait.start, wait.end))
    return UpdateBound(
        version=update.facts["version"],
        seconds=update.seconds,
        trainer=parts | {OTHER: max(0.0, update.seconds - sum(parts.values()))},
        waiting=waiting | {"groups complete": parts[WAIT] - sum(waiting.values())},
        training=training | {OTHER: parts[TRAIN] - sum(training.values())},
        engines=_engine_seconds([each for each in workers if each.within(window)], window),
    )


def bound_table(bound: UpdateBound) -> Table:
    """The rows for a terminal."""
    title = f"update {bound.version}: {bound.seconds:.1f} s"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("s", "share"):
        table.add_column(name, justify="right")
    for label, seconds, share, depth in bound.rows():
        table.add_row("  " * depth + label, f"{seconds:.2f}", f"{share:.0%}", style="dim" if depth else "")
    return table


def _waited_for(workers: Sequence[ProcessTimeline], update: TimelineSpan, wait: Window) -> dict[str, float]:
    """Seconds of a wait for groups by what the episode did that ended last, of the group that arrived last."""
    tickets = {tuple(each) for each in update.facts["tickets"]}
    groups = [
        (span.end, worker, span)
        for worker in workers
        for span in worker.within(wait)
        if span.name == "ticket" and span.ticket in tickets and span.end <= update.end
    ]
    if not groups:
        return {}
    _, worker, group = max(groups, key=lambda each: each[0])
    in_group = worker.within((group.start, group.end))
    episodes = [span for span in in_group if span.name == "episode" and span.ticket == group.ticket]
    if not episodes:
        return {}
    last = max(episodes, key=lambda span: span.end)
    window = wait[0], min(wait[1], group.end)
    found = defaultdict(float, {"no ticket": max(0.0, min(group.start, window[1]) - window[0])})
    for span in in_group:
        if span.track == last.track and span.name in ACTIVITIES and _encloses(last, span):
            found[ACTIVITIES[span.name]] += span.within(window)
    found["ring"] = max(0.0, window[1] - max(last.end, window[0]))
    found[OTHER] = max(0.0, window[1] - window[0] - sum(found.values()))
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _engine_seconds(workers: Sequence[ProcessTimeline], window: Window) -> dict[str, float]:
    figures = []
    for spans in (worker.within(window) for worker in workers):
        pauses = [span for span in spans if span.name == "pause for weights"]
        paused = _covered(pauses, window)
        busy = _covered([*pauses, *(span for span in spans if span.name == "generate")], window) - paused
        figures.append((busy, paused, sum(span.within(window) for span in spans if span.name == "wait for tickets")))
    names = ("generate", "paused for weights", "no ticket")
    return {name: fmean(values) for name, values in zip(names, zip(*figures, strict=True), strict=False)}


def _covered(spans: Iterable[TimelineSpan], window: Window) -> float:
    """Seconds of a window in which there is at least one of the spans."""
    total, until = 0.0, window[0]
    for span in sorted(spans, key=lambda span: span.start):
        end = min(span.end, window[1])
        if end > until:
            total += end - max(span.start, until)
            until = end
    return total


def _encloses(outer: TimelineSpan, span: TimelineSpan) -> bool:
    return span.start >= outer.start and span.end <= outer.end
