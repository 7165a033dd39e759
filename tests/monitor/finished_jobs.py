"""What must hold for the timeline of a finished job."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from megatron_webrl.monitor.timeline import (
    SYNC,
    TRAIN,
    WAIT,
    ProcessTimeline,
    find_updates,
    read_timeline,
    update_bound,
)
from megatron_webrl.monitor.trace import trace_events
from megatron_webrl.track import episodes, summary
from tests.monitor.trace_format import trace_problems

TOLERANCE = 0.05


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
        assert sum(found.trainer.values()) == pytest.approx(found.seconds, rel=0.01)
        assert sum(found.path.values()) == pytest.approx(found.seconds, rel=0.01)
        assert 0 < found.engines["generate"] <= found.seconds
    for (_, found), (before, update) in zip(pairwise(bounds), pairwise(updates), strict=True):
        assert found.seconds == pytest.approx(update["finished_at"] - before["finished_at"], rel=TOLERANCE)

    steps = [step for line in episodes.read_lines(folder) for step in line["steps"]]
    generated = sum(s.seconds for p in processes for s in p.named("generate") if s.track.startswith("episode "))
    assert generated >= sum(step["generation_seconds"] for step in steps) * (1 - TOLERANCE)  # and those not logged
