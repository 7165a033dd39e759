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
    """What a viewer would refuse or draw wrongly: fields, and slices that overlap and do not nest."""
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
    return problems
