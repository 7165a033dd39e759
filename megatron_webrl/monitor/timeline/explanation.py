"""Why an update took as long as it did: its parts, its critical path, what idled, and what more machines would give.

Update n lasts from the end of update n - 1 to its own, as `finished_at` in updates.jsonl. The critical path is a chain
without a gap of things that each waited for the one before it: the trainer's own work, and while it waited for groups,
the episode that ended last of the group that arrived last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.monitor.timeline.activity import (
    EPISODE_ACTIVITIES,
    OTHER,
    SpanIndex,
    WorkerActivity,
    acting_seconds,
    clipped,
    worker_activity,
)
from megatron_webrl.monitor.timeline.estimate import Estimate, RolloutSettings, estimate
from megatron_webrl.monitor.timeline.processes import ProcessTimeline, TimelineSpan, Window

WAIT, TRAIN, EXCHANGE = "wait for groups", "train", "weight exchange"
PARTS = (WAIT, TRAIN, EXCHANGE, "checkpoint", "log and account")
MUCH, LITTLE = 0.5, 0.15  # share of an update's time that the trainer waits: rollout bounds it, the trainer does
TRAINING_PARTS = ("pack", "log-probabilities", "forward and backward", "optimizer")
_STEP_WORDS = {"generate": "generation", "act": "the action in the browser", "reset": "opening its page"}


@dataclass(frozen=True)
class LastGroup:
    """The group that arrived last of an update, and its slowest episode."""

    ticket: int
    worker: str
    claimed_before: float  # seconds from its claim to its arrival
    episode: int  # index of the one that ended last
    slowest: str  # its longest wait or operation, in words
    slowest_seconds: float
    after_wait_began: float  # seconds that the trainer waited until it arrived


@dataclass(frozen=True)
class UpdateExplanation:
    """One update."""

    version: int
    seconds: float
    parts: dict[str, float]  # seconds of the trainer's first rank, by name; with `other` they are all of the update
    training: dict[str, float]  # of these, of the training
    image_wait: float  # within the training
    pause: float  # the longest pause of an engine for weights
    path: dict[str, float]  # the critical path: seconds by name; they are all of the update
    workers: tuple[WorkerActivity, ...]  # over the update
    waited_for: tuple[WorkerActivity, ...]  # over the time that the trainer waited for groups; empty if it did not
    last_group: LastGroup | None
    estimate: Estimate

    @property
    def wait_share(self) -> float:
        """Share of the update in which the trainer waited for groups."""
        return self.parts[WAIT] / self.seconds

    @property
    def bound(self) -> str:
        """What bounded the update: `rollout`, `trainer`, or `both` in turn."""
        if self.wait_share >= MUCH:
            return "rollout"
        return "trainer" if self.wait_share <= LITTLE else "both"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"wait_share": self.wait_share, "bound": self.bound}


class UpdateExplainer:
    """Explains the updates of a run."""

    def __init__(
        self, processes: Sequence[ProcessTimeline], config: Config, updates: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`updates`: of updates.jsonl, for the groups dropped. Raises ConfigError if no update has been recorded."""
        self._settings = RolloutSettings.from_config(config)
        self._groups_needed = config.trainer.groups_per_update + _dropped_groups(updates, config.rollout.group_size)
        self._workers = [SpanIndex(each) for each in processes if each.role.startswith("rollout-")]
        self._updates: dict[int, tuple[SpanIndex, TimelineSpan]] = {}
        for process in processes:
            if process.role == "trainer-0":  # of several attempts the last one counts
                index = SpanIndex(process)
                self._updates |= {update.facts["version"]: (index, update) for update in process.named("update")}
        if not self._updates:
            raise ConfigError("the timeline has no complete update yet")

    @property
    def versions(self) -> list[int]:
        """The updates that can be explained."""
        return sorted(self._updates)

    def window(self, version: int) -> Window:
        """Start and end of an update, unix seconds. Raises ConfigError if it is not in the timeline."""
        if version not in self._updates:
            first, last = self.versions[0], self.versions[-1]
            raise ConfigError(f"update {version} is not in the timeline, which has updates {first} to {last}")
        update = self._updates[version][1]
        return update.start, update.end

    def explain(self, version: int) -> UpdateExplanation:
        """Explain an update. Raises ConfigError if it is not in the timeline."""
        window = self.window(version)
        trainer, update = self._updates[version]
        spans = [span for span in trainer.within(window) if span.track == "" and span is not update]
        waits = [span for span in spans if span.name == WAIT]
        outer = [s for s in spans if s.name in PARTS and (s in waits or not any(_within(s, wait) for wait in waits))]
        parts = {name: sum(clipped(span, window) for span in outer if span.name == name) for name in PARTS}
        training = {name: sum(clipped(span, window) for span in spans if span.name == name) for name in TRAINING_PARTS}
        workers = self._activities(window)
        wait = max(waits, key=lambda span: span.seconds, default=None)
        waited = None if wait is None else (max(wait.start, window[0]), min(wait.end, window[1]))
        last_group, within_wait = self._last_group(update, waited)
        seconds = window[1] - window[0]
        parts["other"] = max(0.0, seconds - sum(parts.values()))
        path = {name: parts[name] for name in (*PARTS[2:], "other")} | training | within_wait
        path["other training"] = parts[TRAIN] - sum(training.values())
        path["waiting, groups complete"] = parts[WAIT] - sum(within_wait.values())
        work = self._groups_needed * self._group_seconds(window)
        return UpdateExplanation(
            version=version,
            seconds=seconds,
            parts=parts,
            training=training,
            image_wait=sum(clipped(span, window) for span in spans if span.name == "wait for images"),
            pause=max((each.engine_paused * seconds for each in workers), default=0.0),
            path={name: value for name, value in path.items() if value > 0},
            workers=workers,
            waited_for=() if waited is None else self._activities(waited),
            last_group=last_group,
            estimate=estimate(self._settings, seconds, parts[WAIT], parts[TRAIN], work),
        )

    def _group_seconds(self, window: Window) -> float:
        """Seconds that a group used engine or browsers, mean over those that ended in the window, or ran in it."""
        groups = [(index, span) for index in self._workers for span in index.within(window) if span.name == "ticket"]
        ended = [each for each in groups if each[1].end <= window[1]]
        return fmean([acting_seconds(span, index.acting_ends) for index, span in ended or groups] or [0.0])

    def _activities(self, window: Window) -> tuple[WorkerActivity, ...]:
        """Those of the workers that did something in a window."""
        return tuple(worker_activity(index, window) for index in self._workers if index.within(window))

    def _last_group(self, update: TimelineSpan, wait: Window | None) -> tuple[LastGroup | None, dict[str, float]]:
        """The group of the update that arrived last; and what the trainer waited for in its episode, in seconds."""
        arrived = [
            (span.end, index, span)
            for index in self._workers
            for epoch, ticket in update.facts["tickets"]
            if (span := index.tickets.get((epoch, ticket))) is not None and span.end <= update.end
        ]
        if not arrived or wait is None:
            return None, {}
        end, index, group = max(arrived, key=lambda each: each[0])
        members = [
            span for span in index.within((group.start, group.end))
            if span.name == "episode" and span.facts["ticket"] == group.facts["ticket"]
        ]  # fmt: skip
        if not members:
            return None, {}
        last = max(members, key=lambda span: span.end)
        steps = [
            span for span in index.within((last.start, last.end))
            if span.track == last.track and span.name in EPISODE_ACTIVITIES
        ]  # fmt: skip
        slowest = max(steps, key=lambda span: span.seconds, default=last)
        found = LastGroup(
            ticket=group.facts["ticket"],
            worker=index.process.role,
            claimed_before=end - group.start,
            episode=last.facts["index"],
            slowest=_describe(slowest),
            slowest_seconds=slowest.seconds,
            after_wait_began=max(0.0, end - wait[0]),
        )
        return found, _path_in_wait(group, last, steps, (wait[0], min(wait[1], end)))


def _dropped_groups(updates: Sequence[Mapping[str, Any]], group_size: int) -> float:
    """Dropped groups of an update, mean."""
    if not updates:
        return 0.0
    dropped = sum(value for name, value in updates[-1].get("extra", {}).items() if name.startswith("dropped/"))
    return float(dropped) / group_size / int(updates[-1]["version"])


def _path_in_wait(
    group: TimelineSpan, last: TimelineSpan, steps: Sequence[TimelineSpan], window: Window
) -> dict[str, float]:
    """Seconds of a window in which the trainer waited for a group, by what the group's last episode did."""
    if window[1] <= window[0]:
        return {}
    found: dict[str, float] = defaultdict(float)
    for step in steps:
        found[f"last group: {EPISODE_ACTIVITIES[step.name]}"] += clipped(step, window)
    found["last group: not claimed yet"] = max(0.0, min(group.start, window[1]) - window[0])
    found["last group: writing to the ring"] = max(0.0, window[1] - max(last.end, window[0]))
    found[f"last group: {OTHER}"] = max(0.0, window[1] - window[0] - sum(found.values()))
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _within(span: TimelineSpan, outer: TimelineSpan) -> bool:
    return span.start >= outer.start and span.end <= outer.end


def _describe(span: TimelineSpan) -> str:
    """The longest part of an episode, in words."""
    if span.name not in _STEP_WORDS:
        return EPISODE_ACTIVITIES.get(span.name, span.name)
    step = f"step {span.facts['step']}, " if "step" in span.facts else ""
    return f"{step}{_STEP_WORDS[span.name]}"


@dataclass(frozen=True)
class RunExplanation:
    """Means over updates."""

    updates: int
    first: int
    last: int
    seconds: float  # of an update
    parts: dict[str, float]
    path: dict[str, float]
    engine_busy: float  # share of time, mean over engines
    estimate: Estimate


def summarise(explained: Sequence[UpdateExplanation]) -> RunExplanation:
    """Means over at least one update."""
    return RunExplanation(
        updates=len(explained),
        first=explained[0].version,
        last=explained[-1].version,
        seconds=fmean(each.seconds for each in explained),
        parts=_means([each.parts for each in explained]),
        path=_means([each.path for each in explained]),
        engine_busy=fmean([w.engine_busy for each in explained for w in each.workers] or [0.0]),
        estimate=Estimate(
            fmean(each.estimate.one_more_engine for each in explained),
            fmean(each.estimate.one_more_trainer for each in explained),
        ),
    )


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in values for name in each)
    return {name: sum(each.get(name, 0.0) for each in values) / len(values) for name in names}
