"""What must hold for the timeline of a finished job, and for a trace by the Trace Event Format (monitor/trace.py)."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.monitor.timeline import (
    SYNC,
    TRAIN,
    WAIT,
    ProcessTimeline,
    UpdateBound,
    find_updates,
    read_timeline,
    update_bound,
)
from megatron_webrl.monitor.trace import trace_events
from megatron_webrl.track import episodes, summary

TOLERANCE = 0.05
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


def check_pauses(worker: ProcessTimeline, trainer: ProcessTimeline) -> None:
    """An engine pauses after the trainer has begun to send a version, and serves it before the trainer ends."""
    error = 0.001
    sent = {span.facts["version"]: span for span in trainer.named("weight exchange")}
    for pause in worker.named("pause for weights"):
        exchange = sent[pause.facts["version"]]
        assert exchange.start - error <= pause.start < pause.end <= exchange.end + error


def check_timeline(folder: Path, roles: set[str]) -> None:
    """The trace is valid, and an update has the figures of updates.jsonl."""
    processes, updates = read_timeline(folder), summary.read_updates(folder)
    assert {process.role for process in processes} == roles
    for process in processes:
        check_pauses(process, next(each for each in processes if each.role == "trainer-0"))
    events = trace_events(processes)
    assert not trace_problems(events)
    spans = find_updates(processes)
    assert list(spans) == [update["version"] for update in updates]
    bounds = [update_bound(processes, spans[update["version"]]) for update in updates]
    for found, update in zip(bounds, updates, strict=True):
        seconds = update["seconds"]
        for part, name in ((WAIT, "wait"), (TRAIN, "train"), (SYNC, "sync")):
            assert found.trainer[part] == pytest.approx(seconds[name], rel=TOLERANCE, abs=0.01), part
        assert sums(found) == pytest.approx((found.seconds, found.trainer[WAIT], found.trainer[TRAIN]), rel=0.01)
        assert min(*found.waiting.values(), *found.training.values()) > -0.01
        assert 0 <= found.engines["generate"] <= found.seconds + 0.01  # 0: its groups were there
    assert any(found.engines["generate"] for found in bounds)
    for (_, found), (before, update) in zip(pairwise(bounds), pairwise(updates), strict=True):
        seconds = update["finished_at"] - before["finished_at"]  # an update may take less than half a second
        assert found.seconds == pytest.approx(seconds, rel=TOLERANCE, abs=0.25)

    steps = [step for line in episodes.read_lines(folder) for step in line["steps"]]
    generated = sum(s.seconds for p in processes for s in p.named("generate") if s.track.startswith("episode "))
    assert generated >= sum(step["generation_seconds"] for step in steps) * (1 - TOLERANCE)  # and those not logged


def sums(bound: UpdateBound) -> tuple[float, float, float]:
    """Seconds of all parts of an update, and of the parts of its wait and of its training."""
    return tuple(sum(parts.values()) for parts in (bound.trainer, bound.waiting, bound.training))


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
