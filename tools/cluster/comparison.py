"""A measured run as what a simulation is fed with, and as the figures that it should give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from megatron_webrl.config.load import parse_config as read_config
from megatron_webrl.config.schema import Config
from megatron_webrl.placement.simulation import (
    EpisodeWork,
    GroupWork,
    RecordedWorkload,
    SimulationSettings,
    StepWork,
    UpdateTimes,
    linear_slowdown,
    simulate,
)
from megatron_webrl.track import episodes, summary
from megatron_webrl.types import TRAINABLE_OUTCOMES
from tools.cluster import timeline

WARMUP_UPDATES = 1  # the first update waits for engines and pages to start
ZERO_VARIANCE_DISPOSITIONS = ("all_failed", "all_succeeded", "zero_variance")
ABSOLUTE_TOLERANCE = {"staleness": 0.1, "waiting": 0.05}  # versions, fraction: smaller differences agree

Update = Mapping[str, Any]


@dataclass(frozen=True)
class RunFigures:
    """The compared figures, from the end of the first update to the end of the last."""

    per_hour: float  # trained trajectories
    staleness: float  # versions, mean over trajectories
    waiting: float  # fraction of time in which the trainer waits for groups
    updates_per_hour: float


@dataclass(frozen=True)
class MeasuredRun:
    """A run's settings, work, times and figures."""

    name: str
    settings: SimulationSettings
    serial: float  # fraction of a request's work that the engine does one request at a time
    workload: RecordedWorkload
    cycles: tuple[UpdateTimes, ...]
    figures: RunFigures


@dataclass(frozen=True)
class FigureComparison:
    """One figure, measured and simulated."""

    name: str
    measured: float
    simulated: float  # mean over seeds
    spread: float  # standard deviation over seeds
    agrees: bool

    @property
    def ratio(self) -> float | None:
        """Simulated divided by measured; None for a measured 0."""
        return self.simulated / self.measured if self.measured else None


def read_run(folder: Path) -> MeasuredRun:
    """Read a run's folder. Raises ValueError, in one line, or OSError if the run cannot be simulated."""
    config = read_config(folder / "config.yaml")
    updates, lines = summary.read_updates(folder), episodes.read_lines(folder)
    _check_run(folder, config, updates, lines)
    placed = timeline.reconstruct_timelines(lines, config.rollout.stepping)
    engine = timeline.fit_engine(placed, *_spans(config, updates), _load_intervals(updates))
    settings = SimulationSettings(
        mode=config.rollout.mode,
        stepping=config.rollout.stepping,
        max_staleness=config.rollout.max_staleness,
        groups_per_update=config.trainer.groups_per_update,
        groups_in_flight=config.rollout.groups_in_flight,
        engines=config.rollout.engines,
        updates=len(updates),
        slowdown=linear_slowdown(engine.serial),
        overlap=engine.overlap,
        warmup_updates=WARMUP_UPDATES,
    )
    workload = _workload(placed, engine.request_work.tolist(), config.trainer.zero_variance_groups == "drop")
    cycles, figures = _cycles(updates, lines), _figures(updates, lines)
    return MeasuredRun(folder.name, settings, engine.serial, workload, cycles, figures)


def _check_run(folder: Path, config: Config, updates: Sequence[Update], lines: Sequence[timeline.EpisodeLine]) -> None:
    if config.run.resume:
        raise ValueError(f"{folder} was resumed (run.resume): its times have a gap; check a run without a restart")
    if config.evaluation.every:
        raise ValueError(
            f"{folder} evaluated during training (evaluation.every={config.evaluation.every}), which is not "
            "simulated: check a run with evaluation.every=0"
        )
    if len(updates) <= WARMUP_UPDATES:
        raise ValueError(
            f"{folder} has {len(updates)} updates; the first {WARMUP_UPDATES} are not counted: "
            f"run at least {WARMUP_UPDATES + 1}"
        )
    if not any(line["disposition"] == episodes.TRAINED for line in lines):
        raise ValueError(f"{folder} has no trained episodes in {episodes.FILE}")


def _spans(config: Config, updates: Sequence[Update]) -> tuple[list[timeline.TimeSpan], list[timeline.TimeSpan]]:
    """Spans in which the trainer trained, and in which the engines were paused for weights; unix seconds."""
    training, pauses = [], []
    for update in updates:
        seconds, end = update["seconds"], update["finished_at"]
        if config.rollout.mode == "one_step_off":  # sends the weights first, without groups in flight
            training.append((end - seconds["train"], end))
        else:
            begin = end - seconds["sync"]
            training.append((begin - seconds["train"], begin))
            pauses.append((end - _pause(update), end))
    return training, pauses


def _load_intervals(updates: Sequence[Update]) -> list[timeline.LoadInterval]:
    """Mean requests in an engine between updates, where the workers reported them."""
    return [
        ((before["finished_at"], update["finished_at"]), update["extra"]["engine/running_requests"])
        for before, update in pairwise(updates)
        if "engine/running_requests" in update["extra"]
    ]


def _pause(update: Update) -> float:
    sync = update["seconds"]["sync"]
    return float(min(sync, update["extra"].get("weights/pause_seconds", sync)))


def _cycles(updates: Sequence[Update], lines: Sequence[timeline.EpisodeLine]) -> tuple[UpdateTimes, ...]:
    tokens: dict[int, int] = defaultdict(int)
    for line in lines:
        if line["disposition"] == episodes.TRAINED:
            tokens[line["version"] + 1] += sum(
                step["prompt_tokens"] + step["response_tokens"] for step in line["steps"]
            )
    cycles = []
    for before, update in pairwise(updates[WARMUP_UPDATES - 1 :]):
        seconds = update["seconds"]
        other = update["finished_at"] - before["finished_at"] - sum(seconds[part] for part in ("wait", "train", "sync"))
        per_token = seconds["train"] / max(1, tokens[update["version"]])
        cycles.append(UpdateTimes(per_token, seconds["sync"], _pause(update), max(0.0, other)))
    return tuple(cycles)


def _workload(placed: Sequence[timeline.EpisodeTimeline], work: Sequence[float], drops: bool) -> RecordedWorkload:
    """Whole groups by ticket: the episodes of one task are similar, and are trained or dropped together.

    Aborted episodes count with the steps that they had: the other steps are unknown.
    """
    episodes: dict[int, list[EpisodeWork]] = defaultdict(list)
    dispositions: dict[int, set[str]] = defaultdict(set)
    outcomes: dict[int, set[str]] = defaultdict(set)
    remaining = iter(work)
    for one in placed:
        steps = tuple(
            StepWork(next(remaining), step["browser_seconds"], step["prompt_tokens"], step["response_tokens"])
            for step in one.line["steps"]
        )
        if one.line["disposition"] == "duplicate":
            continue
        trainable = bool(steps) and one.line["outcome"] in (*TRAINABLE_OUTCOMES, "aborted")
        episodes[one.line["ticket"]].append(EpisodeWork(one.reset, steps, trainable))
        dispositions[one.line["ticket"]].add(one.line["disposition"])
        if trainable:
            outcomes[one.line["ticket"]].add(one.line["outcome"])
    tickets = sorted(episodes)
    groups = [GroupWork(tuple(episodes[t]), _drop_reason(dispositions[t], outcomes[t], drops)) for t in tickets]
    return RecordedWorkload(groups, {ticket: index for index, ticket in enumerate(tickets)})


def _drop_reason(dispositions: set[str], outcomes: set[str], drops: bool) -> str | None:
    """The reason to drop the group in any case; None if it can be trained."""
    if not outcomes:
        return "masked"
    if names := sorted(dispositions & set(ZERO_VARIANCE_DISPOSITIONS)):
        return names[0]
    # The trainer did not check the rewards of a stale group.
    return "zero_variance" if drops and "stale" in dispositions and len(outcomes) == 1 else None


def _figures(updates: Sequence[Update], lines: Sequence[timeline.EpisodeLine]) -> RunFigures:
    counted = updates[WARMUP_UPDATES:]
    seconds = counted[-1]["finished_at"] - updates[WARMUP_UPDATES - 1]["finished_at"]
    versions = {update["version"] for update in counted}
    lags = [
        line["version"] - line["oldest_version"]
        for line in lines
        if line["disposition"] == episodes.TRAINED and line["version"] + 1 in versions
    ]
    return RunFigures(
        per_hour=3600 * len(lags) / seconds,
        staleness=sum(lags) / len(lags),
        waiting=sum(update["seconds"]["wait"] for update in counted) / seconds,
        updates_per_hour=3600 * len(counted) / seconds,
    )


def compare_with_simulation(run: MeasuredRun, seeds: int, tolerance: float) -> list[FigureComparison]:
    """Simulate a run with `seeds` seeds and compare the mean figures; `tolerance` is relative."""
    results = [simulate(run.settings, run.workload, run.cycles, seed) for seed in range(seeds)]
    rows = []
    for name, measured in vars(run.figures).items():
        values = [getattr(result, name) for result in results]
        simulated = fmean(values)
        agrees = abs(simulated - measured) <= max(tolerance * measured, ABSOLUTE_TOLERANCE.get(name, 0.0))
        rows.append(FigureComparison(name, measured, simulated, pstdev(values), agrees))
    return rows
