"""Figures of an arm over its seeds. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from tools.bench.bootstrap import Interval, mean_over_seeds, percentile_interval, resample_means
from tools.bench.learning.arms import ARMS, INITIAL
from tools.bench.learning.runs import Run, TaskSuccess

Evaluations = Mapping[str, Sequence[TaskSuccess]]

FIGURES: dict[str, dict[str, int]] = {
    "before": {"before": 1},
    "after": {"after": 1},
    "gain": {"after": 1, "before": -1},
    "blind_gain": {"after_blank_images": 1, "before_blank_images": -1},
    "seeing_gain": {"after": 1, "before": -1, "after_blank_images": -1, "before_blank_images": 1},
    "greedy_after": {"after_greedy": 1},
}
"""Weighted sums of the success in several evaluations, by the names of summary.json. Sampled where nothing is said."""
LOSS = 0.03  # of success, beyond which an environment counts as lost


@dataclass(frozen=True)
class ArmFigures:
    """All runs of one arm."""

    arm: str
    seeds: Sequence[int]
    success: Mapping[str, Interval | None]  # by FIGURES; None if an evaluation is missing
    lost: Mapping[str, float]  # environment -> change of sampled success, for those that lost more than LOSS
    metric: float | None  # of the arm, mean over updates and seeds
    minutes: float  # of a run, mean


def arm_figures(runs: Sequence[Run]) -> list[ArmFigures]:
    """Figures of every arm in `runs`. The initial evaluation of a seed is that of all its runs."""
    initial = {run.seed: run.evaluations for run in runs if run.arm == INITIAL}
    by_arm: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.arm != INITIAL:
            by_arm[run.arm].append(run)
    found = []
    for arm in sorted(by_arm, key=list(ARMS).index):
        members = by_arm[arm]
        seeds = [{**initial.get(run.seed, {}), **run.evaluations} for run in members]
        metrics = [run.metric for run in members if run.metric is not None]
        found.append(
            ArmFigures(
                arm=arm,
                seeds=[run.seed for run in members],
                success=success_figures(seeds),
                lost={name: change for name, change in changes(seeds).items() if change < -LOSS - 1e-9},
                metric=fmean(metrics) if metrics else None,
                minutes=fmean(run.minutes for run in members),
            )
        )
    return found


def success_figures(seeds: Sequence[Evaluations]) -> dict[str, Interval | None]:
    """The FIGURES, means over tasks and then over seeds; None where a seed lacks an evaluation.

    seeds: the evaluations of each. A task without a verdict in one of its seed's evaluations is left out of all
    figures, so that they add up. The intervals are over seeds and tasks, with the same draws; with one seed over tasks
    alone.
    """
    names = sorted(set.intersection(*(set(evaluations) for evaluations in seeds)))
    tables = [_table(evaluations, names)[1] for evaluations in seeds]
    found: dict[str, Interval | None] = dict.fromkeys(FIGURES)
    if not names or not all(len(table) for table in tables):
        return found
    observed, resampled = mean_over_seeds(tables), resample_means(tables)
    for figure, terms in FIGURES.items():
        if terms.keys() <= set(names):
            weights = np.array([terms.get(name, 0) for name in names])
            found[figure] = percentile_interval(float(observed @ weights), resampled @ weights)
    return found


def changes(seeds: Sequence[Evaluations]) -> dict[str, float]:
    """Change of the sampled success of each environment, mean over the tasks of a seed, then over seeds.

    Seeds without both evaluations are left out.
    """
    by_environment: dict[str, list[float]] = defaultdict(list)
    for evaluations in seeds:
        if not {"before", "after"} <= evaluations.keys():
            continue
        tasks, table = _table(evaluations, ("before", "after"))
        for environment in {environment for _, environment in tasks}:
            rows = [number for number, task in enumerate(tasks) if task[1] == environment]
            before, after = table[rows].mean(axis=0)
            by_environment[environment].append(float(after - before))
    return {environment: fmean(means) for environment, means in sorted(by_environment.items())}


def _table(evaluations: Evaluations, names: Sequence[str]) -> tuple[list[tuple[int, str]], np.ndarray]:
    """Index and environment of the tasks with a verdict in all named evaluations, and their success, [tasks, names]."""
    successes = [{(task.index, task.environment): task.success for task in evaluations[name]} for name in names]
    tasks = sorted(set.intersection(*map(set, successes))) if successes else []
    return tasks, np.array([[each[task] for each in successes] for task in tasks], np.float64)
