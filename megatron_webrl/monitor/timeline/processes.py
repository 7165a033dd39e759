"""Read the timeline files of a run, with the times of all nodes on one clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.clock import ClockOffset
from megatron_webrl.track.timeline import FOLDER, timeline_files
from megatron_webrl.util import history

MARGIN_SECONDS = 900.0
EpisodeKey = tuple[int, int, int]  # restart epoch, ticket, index
Window = tuple[float, float]  # from and to, unix seconds


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One span of a process. Times are unix seconds by the control service's clock."""

    name: str
    track: str
    start: float
    end: float
    facts: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class ProcessTimeline:
    """What one process did. A role that was restarted has several."""

    role: str
    node: int
    host: str
    pid: int
    clock_error: float | None  # bound of the error of its times, seconds; None: unknown
    spans: tuple[TimelineSpan, ...]  # by start; of spans that start together, the outer one first

    def named(self, name: str, track: str | None = None) -> list[TimelineSpan]:
        """The spans of a name, on one track or on all."""
        return [span for span in self.spans if span.name == name and track in (None, span.track)]


@dataclass
class _Recorded:
    """The files of one process."""

    header: Mapping[str, Any]  # of its first file
    spans: list[list[Any]]
    offsets: list[ClockOffset]


def read_timeline(folder: Path, role: str = "", window: Window | None = None) -> list[ProcessTimeline]:
    """The processes of a run, or of a role, by role and start. Raises ConfigError if the run has no timeline.

    `window`: spans that ended MARGIN_SECONDS before it or began as long after it are left out, to save memory.
    """
    recorded = _read_files(folder / FOLDER, role, window)
    if not recorded:
        raise ConfigError(f"{folder} has no timeline: start a run with tracking.timeline=true")
    starts: dict[str, float] = {}  # unix time at the zero of a clock, by a process of its machine, or else by another
    for each in recorded:
        starts.setdefault(each.header["clock"], each.header["unix"] - each.header["monotonic"])
    for each in recorded:
        for offset in each.offsets:
            starts.setdefault(offset.clock, starts[each.header["clock"]] - offset.offset)
    return [_align(each, starts) for each in recorded]


def _read_files(folder: Path, role: str, window: Window | None) -> list[_Recorded]:
    by_process: dict[tuple[Any, ...], _Recorded] = {}
    for path, match in timeline_files(folder):
        if role not in ("", match["role"]):
            continue
        lines = history.read(path)
        header: Mapping[str, Any] = next(lines, {})
        if "role" not in header:
            continue  # of a process that was killed at its start
        process = by_process.setdefault(
            (header["role"], header["host"], header["pid"], header["clock"]), _Recorded(header, [], [])
        )
        first, last = _microseconds(header, window)
        for line in lines:
            process.spans += (span for span in line.get("spans", ()) if span[3] > first and span[2] < last)
            if "service" in line:
                process.offsets.append(ClockOffset(**line["service"]))
    return sorted(by_process.values(), key=lambda each: (_natural(each.header["role"]), each.header["unix"]))


def _microseconds(header: Mapping[str, Any], window: Window | None) -> Window:
    """A window with its margins by the clock of a process, about: by the time of day of its machine."""
    if window is None:
        return -math.inf, math.inf
    zero = header["unix"] - header["monotonic"]
    return (window[0] - MARGIN_SECONDS - zero) * 1e6, (window[1] + MARGIN_SECONDS - zero) * 1e6


def _natural(role: str) -> tuple[str, int]:
    name, _, number = role.rpartition("-")
    return (name, int(number)) if number.isdigit() else (role, 0)


def _align(recorded: _Recorded, starts: Mapping[str, float]) -> ProcessTimeline:
    header = recorded.header
    clock = recorded.offsets[-1].clock if recorded.offsets else header["clock"]
    offsets = sorted((each for each in recorded.offsets if each.clock == clock), key=lambda each: each.at)
    error = max((each.error for each in offsets), default=None if len(starts) > 1 else 0.0)
    if (
        clock == header["clock"]
    ):  # the service runs on this machine; or its clock is unknown, and the time of day must do
        offsets, error = [], None if error is None else 0.0
    zero = starts[clock]
    times = [each.at for each in offsets]

    def aligned(microseconds: int) -> float:
        seconds = microseconds / 1e6
        return zero + seconds + (_interpolate(seconds, times, offsets) if offsets else 0.0)

    spans = [
        TimelineSpan(name, track, aligned(start), aligned(end), facts)
        for name, track, start, end, facts in recorded.spans
    ]
    spans.sort(key=lambda span: (span.start, -span.end))
    return ProcessTimeline(header["role"], header["node"], header["host"], header["pid"], error, tuple(spans))


def _interpolate(seconds: float, times: Sequence[float], offsets: Sequence[ClockOffset]) -> float:
    """The offset at a time: between two estimates they drift apart evenly; before the first and after the last, not."""
    at = bisect_left(times, seconds)
    if at in (0, len(times)):
        return offsets[min(at, len(times) - 1)].offset
    before, after = offsets[at - 1], offsets[at]
    share = (seconds - before.at) / (after.at - before.at)
    return before.offset + share * (after.offset - before.offset)


def episodes_of(process: ProcessTimeline) -> dict[EpisodeKey, TimelineSpan]:
    """The last try of each episode."""
    return {(span.facts["epoch"], span.facts["ticket"], span.facts["index"]): span for span in process.named("episode")}


def tickets_of(process: ProcessTimeline) -> dict[tuple[int, int], TimelineSpan]:
    """The groups that a worker has run, by restart epoch and ticket."""
    return {(span.facts["epoch"], span.facts["ticket"]): span for span in process.named("ticket")}


def by_track(spans: Sequence[TimelineSpan]) -> dict[str, list[TimelineSpan]]:
    found: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        found[span.track].append(span)
    return found
