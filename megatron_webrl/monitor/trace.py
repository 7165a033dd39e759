"""A timeline as one trace in the JSON format of Chrome, which ui.perfetto.dev and chrome://tracing load.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each process of the job is a
process of the trace. Rows: what the process itself does; then its tickets and its episodes, which share rows.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.monitor.timeline import ProcessTimeline, TimelineSpan, Window
from megatron_webrl.util import atomic_file

Event = dict[str, Any]
_BROWSER_PARTS = {"acting": "action", "settling": "settle", "capturing": "observe"}


def write_trace(path: Path, processes: Sequence[ProcessTimeline], window: Window | None = None) -> int:
    """Write the trace, compressed if the name ends in .gz; returns the number of events. Raises OSError.

    `window`: only what overlaps it.
    """
    events = trace_events(processes, window)
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    atomic_file.write_bytes(path, gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)
    return len(events)


def trace_events(processes: Sequence[ProcessTimeline], window: Window | None = None) -> list[Event]:
    """The events of a trace; its time begins with the first span."""
    chosen = [each.spans if window is None else each.within(window) for each in processes]
    zero = min((spans[0].start for spans in chosen if spans), default=0.0)
    events: list[Event] = []
    for pid, (process, spans) in enumerate(zip(processes, chosen, strict=True), 1):
        rows = _rows(spans)
        events += _names(pid, process, rows)
        for span in spans:
            events += _slices(span, pid, rows[span.track], zero)
    return events


def _rows(spans: Sequence[TimelineSpan]) -> dict[str, int]:
    """Row of each track: tracks of a kind share rows, one after the other."""
    extents: dict[str, tuple[float, float]] = {}
    for span in spans:
        start, end = extents.get(span.track, (span.start, span.end))
        extents[span.track] = start, max(end, span.end)
    rows: dict[str, int] = {"": 0}
    ends: list[tuple[str, float]] = [("", float("inf"))]  # kind, and end of its last track, by row
    for track in sorted(extents.keys() - {""}, key=lambda track: (_kind(track), extents[track])):
        kind, (start, end) = _kind(track), extents[track]
        row = next((row for row, (of, until) in enumerate(ends) if of == kind and until <= start), len(ends))
        ends[row : row + 1] = [(kind, end)]
        rows[track] = row
    return rows


def _kind(track: str) -> str:
    return track.partition(" ")[0]


def _names(pid: int, process: ProcessTimeline, rows: Mapping[str, int]) -> Iterator[Event]:
    labels = {row: _kind(track) or process.role for track, row in rows.items()}
    whole = ("process", 0, pid, f"{process.role}, node {process.node}, {process.host}")
    for what, row, order, name in (whole, *(("thread", row, row, labels[row]) for row in sorted(labels))):
        common = {"pid": pid, "tid": row, "ph": "M", "ts": 0}
        yield common | {"name": f"{what}_name", "args": {"name": name}}
        yield common | {"name": f"{what}_sort_index", "args": {"sort_index": order}}


def _slices(span: TimelineSpan, pid: int, tid: int, zero: float) -> Iterator[Event]:
    """The slice of a span; that of a step in the browser has its parts within, as the browser server measured them."""

    def slice_of(name: str, start: float, end: float, facts: dict[str, Any]) -> Event:
        begin = _microseconds(start - zero)
        times = {"ts": begin, "dur": _microseconds(end - zero) - begin}
        return {"name": name, "cat": "webrl", "ph": "X", **times, "pid": pid, "tid": tid, "args": facts}

    name = f"{span.name} {span.facts['version']}" if span.name == "update" else span.name
    name = span.track if span.name in ("ticket", "episode") else name
    yield slice_of(name, span.start, span.end, dict(span.facts))
    parts = {label: span.facts[key] for key, label in _BROWSER_PARTS.items() if span.facts.get(key)}
    start = span.start + max(0.0, span.seconds - sum(parts.values())) / 2  # as long to the server as back
    for label, seconds in parts.items():
        end = min(start + seconds, span.end)
        yield slice_of(label, start, max(start, end), {})
        start = end


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
