"""A timeline as one trace in the JSON format of Chrome, which ui.perfetto.dev and chrome://tracing load.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each process of the job is a
process of the trace. Rows: what the process itself does; then its tickets and its episodes, which share rows. The flow
of a trained episode leads from its ticket's claim over the episode and the ring to the update.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.monitor.timeline.processes import (
    EpisodeKey,
    ProcessTimeline,
    TimelineSpan,
    Window,
    by_track,
    episodes_of,
    tickets_of,
)
from megatron_webrl.monitor.timeline.profiles import profile_events
from megatron_webrl.types import TRAINABLE_OUTCOMES
from megatron_webrl.util import atomic_file

Event = dict[str, Any]
_BROWSER_PARTS = {"acting": "action", "settling": "settle", "capturing": "observe"}
_FLOW = {"name": "episode", "cat": "episode"}


def write_trace(
    path: Path, processes: Sequence[ProcessTimeline], window: Window | None = None, profiles: Path | None = None
) -> int:
    """Write the trace, compressed if the name ends in .gz; returns the number of events. Raises OSError, ConfigError.

    `window`: only what overlaps it; `profiles`: folder of torch's profiles.
    """
    events = trace_events(processes, window, profiles)
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    atomic_file.write_bytes(path, gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)
    return len(events)


def trace_events(
    processes: Sequence[ProcessTimeline], window: Window | None = None, profiles: Path | None = None
) -> list[Event]:
    """The events of a trace; its time begins with the first span."""
    chosen = [[span for span in process.spans if _overlaps(span, window)] for process in processes]
    zero = min((spans[0].start for spans in chosen if spans), default=0.0)
    events: list[Event] = []
    rows: list[dict[str, int]] = []
    for number, (process, spans) in enumerate(zip(processes, chosen, strict=True), 1):
        rows.append(_rows(spans))
        events += _names(number, process, rows[-1])
        for span in spans:
            events += _slices(span, number, rows[-1][span.track], zero)
    events += _flows(processes, rows, zero)
    for process, spans in zip(processes, chosen, strict=True):
        for span in (span for span in spans if span.name == "profile"):
            if profiles is not None and (path := profiles / span.facts["file"]).is_file():
                label = f"{process.role}, update {span.facts['version']}, torch"
                first = 1 + max(event["pid"] for event in events)
                events += profile_events(path, label, first, (span.start - zero) * 1e6, span.seconds)
    return events


def _overlaps(span: TimelineSpan, window: Window | None) -> bool:
    return window is None or (span.end > window[0] and span.start < window[1])


def _rows(spans: Sequence[TimelineSpan]) -> dict[str, int]:
    """Row of each track: tracks of a kind share rows, one after the other."""
    extents = {track: (found[0].start, max(s.end for s in found)) for track, found in by_track(spans).items()}
    rows: dict[str, int] = {"": 0}
    ends: list[tuple[str, float]] = [("", float("inf"))]  # kind, and end of its last track, by row
    for track in sorted(extents, key=lambda track: (_kind(track), extents[track])):
        if track in rows:
            continue
        start, end = extents[track]
        free = (row for row, (kind, until) in enumerate(ends) if kind == _kind(track) and until <= start)
        if (row := next(free, None)) is None:
            row = len(ends)
            ends.append(("", 0.0))
        ends[row], rows[track] = (_kind(track), end), row
    return rows


def _kind(track: str) -> str:
    return track.partition(" ")[0]


def _names(number: int, process: ProcessTimeline, rows: Mapping[str, int]) -> Iterator[Event]:
    facts = {"pid": number, "tid": 0, "ph": "M", "ts": 0}
    yield {**facts, "name": "process_name", "args": {"name": f"{process.role}, node {process.node}, {process.host}"}}
    yield {**facts, "name": "process_sort_index", "args": {"sort_index": number}}
    labels = {row: _kind(track) or process.role for track, row in rows.items()}
    for row, label in sorted(labels.items()):
        yield {**facts, "tid": row, "name": "thread_name", "args": {"name": label}}
        yield {**facts, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}


def _slices(span: TimelineSpan, pid: int, tid: int, zero: float) -> Iterator[Event]:
    """The slice of a span; that of a step in the browser has its parts within, as the browser server measured them."""
    name = f"{span.name} {span.facts['version']}" if span.name == "update" else span.name
    name = span.track if span.name in ("ticket", "episode") else name
    yield _slice(name, pid, tid, span.start - zero, span.seconds, dict(span.facts))
    parts = {label: span.facts[key] for key, label in _BROWSER_PARTS.items() if span.facts.get(key)}
    start = span.start - zero + max(0.0, span.seconds - sum(parts.values())) / 2  # as long to the server as back
    for label, seconds in parts.items():
        seconds = min(seconds, max(0.0, span.end - zero - start))
        yield _slice(label, pid, tid, start, seconds, {})
        start += seconds


def _slice(name: str, pid: int, tid: int, start: float, seconds: float, facts: dict[str, Any]) -> Event:
    begin, end = _microseconds(start), _microseconds(start + seconds)
    return {
        "name": name, "cat": "webrl", "ph": "X", "ts": begin, "dur": end - begin, "pid": pid, "tid": tid, "args": facts
    }  # fmt: skip


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _flows(processes: Sequence[ProcessTimeline], rows: Sequence[Mapping[str, int]], zero: float) -> Iterator[Event]:
    """For each trained episode: start at the claim, steps at the episode and the ring, end at the update's training."""
    trained = training_of(processes)
    for number, process in enumerate(processes, 1):
        tickets = tickets_of(process)
        writes = {span.track: span for span in process.named("write to ring")}
        for key, episode in episodes_of(process).items():
            ticket, update = tickets.get(key[:2]), trained.get(key[:2])
            if ticket is None or update is None or episode.facts.get("outcome") not in TRAINABLE_OUTCOMES:
                continue
            write, (pid, training) = writes.get(ticket.track), update
            places = [("s", number, ticket, ticket.start), ("t", number, episode, episode.start)]
            places += [("t", number, write, write.start)] if write is not None else []
            if all(span.track in rows[number - 1] for _, _, span, _ in places) and training.track in rows[pid - 1]:
                for phase, where, span, at in places:
                    yield _flow(phase, key, where, rows[where - 1][span.track], at - zero)
                yield _flow("f", key, pid, rows[pid - 1][training.track], training.start - zero) | {"bp": "e"}


def _flow(phase: str, key: EpisodeKey, pid: int, tid: int, at: float) -> Event:
    epoch, ticket, index = key
    return {**_FLOW, "ph": phase, "id": f"{epoch}/{ticket}.{index}", "pid": pid, "tid": tid, "ts": _microseconds(at)}


def training_of(processes: Sequence[ProcessTimeline]) -> dict[tuple[int, int], tuple[int, TimelineSpan]]:
    """By restart epoch and ticket: number of the process that trained the group, from 1, and its span."""
    found = {}
    for number, process in enumerate(processes, 1):
        if process.role == "trainer-0":
            training = {span.facts["version"]: span for span in process.named("train")}
            for update in process.named("update"):
                for epoch, ticket in update.facts["tickets"]:
                    if update.facts["version"] in training:
                        found[epoch, ticket] = number, training[update.facts["version"]]
    return found
