"""Checks of a trace against the Trace Event Format, whose document megatron_webrl/monitor/trace.py names."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
FIELDS = {
    "X": {"name": str, "cat": str, "ph": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "ph": str, "ts": int, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "ph": str, "id": str, "ts": int, "pid": int, "tid": int},
    "t": {"name": str, "cat": str, "ph": str, "id": str, "ts": int, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "ph": str, "id": str, "ts": int, "pid": int, "tid": int, "bp": str},
}
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def read_trace(path: Path) -> list[Event]:
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    return trace["traceEvents"]


def trace_problems(events: list[Event]) -> list[str]:
    """What a viewer would refuse or draw wrongly: fields, slices that overlap and do not nest, loose flows."""
    problems = []
    for event in events:
        expected = FIELDS.get(event["ph"], {})
        if {name: type(value) for name, value in event.items()} != expected:
            problems.append(f"fields of {event}")
        elif event["ts"] < 0 or event.get("dur", 0) < 0:
            problems.append(f"negative time in {event}")
        elif event["ph"] == "M" and set(event["args"]) != {METADATA.get(event["name"])}:
            problems.append(f"metadata {event}")
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    problems += [f"row {row} has no name" for row in rows.keys() - named]
    for row, slices in rows.items():
        stack: list[Event] = []
        for event in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if stack and event["ts"] + event["dur"] > stack[-1]["ts"] + stack[-1]["dur"]:
                problems.append(f"row {row}: {event['name']} at {event['ts']} ends after {stack[-1]['name']}")
            stack.append(event)
    for identity, points in flows_of(events).items():
        phases = "".join(point["ph"] for point in points)
        if phases[0] != "s" or phases[-1] != "f" or set(phases[1:-1]) - {"t"}:
            problems.append(f"flow {identity} has the phases {phases}")
        if [point["ts"] for point in points] != sorted(point["ts"] for point in points):
            problems.append(f"flow {identity} goes back in time")
        problems += [f"flow {identity}: no slice at {point}" for point in points if slice_at(rows, point) is None]
    return problems


def flows_of(events: list[Event]) -> dict[str, list[Event]]:
    """The points of each flow, in the order of the file."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            found[event["id"]].append(event)
    return dict(found)


def slice_at(rows: dict[tuple[int, int], list[Event]], point: Event) -> Event | None:
    """The innermost slice that encloses a point of a flow, which the viewer binds it to."""
    inside = [
        each
        for each in rows.get((point["pid"], point["tid"]), ())
        if each["ts"] <= point["ts"] <= each["ts"] + each["dur"]
    ]
    return min(inside, key=lambda each: each["dur"], default=None)
