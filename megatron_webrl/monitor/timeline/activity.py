"""What a worker's engine and episodes did in a span of time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_webrl.monitor.timeline.processes import ProcessTimeline, TimelineSpan, Window, tickets_of

EPISODE_ACTIVITIES = {
    "generate": "generating",
    "act": "in browsers",
    "reset": "in browsers",
    "wait for browser": "waiting for a browser",
    "judge": "judging",
}
OTHER = "other"  # of an episode: prompts, lockstep


class SpanIndex:
    """The spans of a process, found by time."""

    def __init__(self, process: ProcessTimeline) -> None:
        self.process = process
        self._starts = [span.start for span in process.spans]
        self._longest = max((span.seconds for span in process.spans), default=0.0)
        self.tickets = tickets_of(process)
        judged = {span.track: span.start for span in process.named("judge")}  # of the last try
        self.acting_ends: dict[tuple[int, int], float] = {}
        """By restart epoch and ticket: when the last episode needs neither engine nor browser any more."""
        for span in process.named("episode"):
            ticket = span.facts["epoch"], span.facts["ticket"]
            end = judged.get(span.track, span.end)
            self.acting_ends[ticket] = max(self.acting_ends.get(ticket, end), end)

    def within(self, window: Window) -> list[TimelineSpan]:
        """The spans that overlap a window."""
        first = bisect_left(self._starts, window[0] - self._longest)
        last = bisect_left(self._starts, window[1])
        return [span for span in self.process.spans[first:last] if span.end > window[0]]


@dataclass(frozen=True)
class WorkerActivity:
    """Means over a window."""

    worker: str
    seconds: float  # of the window
    engine_busy: float  # share of the window in which the engine had a request and was not paused
    engine_paused: float  # share of the window
    requests: float
    episodes: float
    groups: float  # that use engine or browsers
    shares: dict[str, float]  # of the time of its episodes, by activity
    no_tickets: float  # share of the window in which it had room for a group and no ticket


def worker_activity(index: SpanIndex, window: Window) -> WorkerActivity:
    """The activity of a worker in a window."""
    seconds, spans = max(1e-9, window[1] - window[0]), index.within(window)
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        totals[span.name] += clipped(span, window)
    by_activity: dict[str, float] = defaultdict(float)
    for name, activity in EPISODE_ACTIVITIES.items():
        by_activity[activity] += totals[name]
    everything = max(totals["episode"], sum(by_activity.values()))
    by_activity[OTHER] = everything - sum(by_activity.values())
    generating = [span for span in spans if span.name == "generate"]
    pauses = [span for span in spans if span.name == "pause for weights"]
    paused = covered(pauses, window)
    busy = covered([*generating, *pauses], window) - paused
    return WorkerActivity(
        worker=index.process.role,
        seconds=seconds,
        engine_busy=busy / seconds,
        engine_paused=paused / seconds,
        requests=totals["generate"] / seconds,
        episodes=totals["episode"] / seconds,
        groups=sum(acting_seconds(each, index.acting_ends, window) for each in spans if each.name == "ticket")
        / seconds,
        shares={name: value / everything for name, value in by_activity.items()} if everything else {},
        no_tickets=totals["wait for tickets"] / seconds,
    )


def acting_seconds(
    group: TimelineSpan, acting_ends: Mapping[tuple[int, int], float], window: Window = (-math.inf, math.inf)
) -> float:
    """Seconds of a group within a window without the wait for its last verdicts, which takes no room in a worker."""
    end = min(acting_ends.get((group.facts["epoch"], group.facts["ticket"]), group.end), group.end, window[1])
    return max(0.0, end - max(group.start, window[0]))


def clipped(span: TimelineSpan, window: Window) -> float:
    """Seconds of a span within a window."""
    return max(0.0, min(span.end, window[1]) - max(span.start, window[0]))


def covered(spans: Iterable[TimelineSpan], window: Window) -> float:
    """Seconds of a window in which there is at least one of the spans."""
    total, until = 0.0, window[0]
    for span in sorted(spans, key=lambda span: span.start):
        end = min(span.end, window[1])
        if end > until:
            total += end - max(span.start, until)
            until = end
    return total
