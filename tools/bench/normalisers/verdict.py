"""What the runs say about the claim. Pure functions.

The claim (arXiv 2606.05597): with 1/|tau| failures are under-weighted and trajectories grow longer; a constant in its
place shortens them at equal success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from tools.bench.bootstrap import RESAMPLES, Interval, mean_over_seeds, percentile_interval, resample_means
from tools.bench.normalisers.gates import Gate

TREATMENT, BASELINE = "constant", "per_trajectory"
SEEDS = 5  # least number for a verdict
LEAST_REDUCTION = 0.15  # of tokens per episode, to confirm
EXCLUDED_REDUCTION = 0.10  # of tokens per episode, to refute
SUCCESS_MARGIN = 0.05  # that success may be lower by

Kind = Literal["confirmed", "refuted", "undecided", "void"]


@dataclass(frozen=True)
class EvaluatedEpisode:
    """An episode of the final evaluation, with a verdict."""

    task: int  # index of the held-out task
    success: bool
    steps: int
    tokens: int  # response tokens of all steps


@dataclass(frozen=True)
class RunFigures:
    """What a verdict needs of one run."""

    arm: str
    seed: int
    episodes: Sequence[EvaluatedEpisode]
    gates: Sequence[Gate]


@dataclass(frozen=True)
class Verdict:
    """The verdict, its reasons, and the differences of constant to per_trajectory; None if they cannot be computed."""

    kind: Kind
    reasons: tuple[str, ...]
    tokens: Interval | None  # per episode, relative: -0.2 is 20 % fewer
    success: Interval | None  # share
    failure_steps: Mapping[int, tuple[float | None, float | None]]  # by seed: constant, per_trajectory


def paired_tables(runs: Sequence[RunFigures]) -> dict[int, np.ndarray]:
    """By seed that has both arms: [tasks, arms, (tokens, success)], float64, of the tasks with a verdict in both."""
    tables = {}
    by_key = {(run.arm, run.seed): {episode.task: episode for episode in run.episodes} for run in runs}
    for seed in sorted({run.seed for run in runs}):
        arms = [by_key.get((arm, seed), {}) for arm in (TREATMENT, BASELINE)]
        tasks = sorted(arms[0].keys() & arms[1].keys())
        if tasks:
            tables[seed] = np.array(
                [[[arm[task].tokens, arm[task].success] for arm in arms] for task in tasks], np.float64
            )
    return tables


def bootstrap(tables: Sequence[np.ndarray], seed: int = 0, resamples: int = RESAMPLES) -> tuple[Interval, Interval]:
    """Relative difference of tokens and difference of success, treatment less baseline.

    tables: one per seed, [tasks, arms, 2], not empty. Resamples seeds, then tasks; both arms share the draws.
    """
    return _differences(mean_over_seeds(tables), resample_means(tables, seed, resamples))


def _differences(observed: np.ndarray, resampled: np.ndarray) -> tuple[Interval, Interval]:
    """observed: [arms, 2]; resampled: [resamples, arms, 2]."""
    tokens = resampled[:, 0, 0] / resampled[:, 1, 0] - 1
    success = resampled[:, 0, 1] - resampled[:, 1, 1]
    values = observed[0, 0] / observed[1, 0] - 1, observed[0, 1] - observed[1, 1]
    tokens_interval, success_interval = (
        percentile_interval(value, samples) for value, samples in zip(values, (tokens, success), strict=True)
    )
    return tokens_interval, success_interval


def failure_steps(runs: Sequence[RunFigures]) -> dict[int, tuple[float | None, float | None]]:
    """Mean steps of failures in the final evaluation by seed: constant, per_trajectory; None without a failure."""
    means: dict[tuple[str, int], float | None] = {}
    for run in runs:
        lengths = [episode.steps for episode in run.episodes if not episode.success]
        means[run.arm, run.seed] = fmean(lengths) if lengths else None
    return {
        seed: (means.get((TREATMENT, seed)), means.get((BASELINE, seed))) for seed in sorted({run.seed for run in runs})
    }


def decide(runs: Sequence[RunFigures]) -> Verdict:
    """The verdict on the runs of the arms constant and per_trajectory; other arms are ignored.

    Void: a gate of a run failed. Undecided: fewer than SEEDS seeds have both arms, or neither of the following.
    Confirmed: tokens per episode at least 15 % lower with the interval below 0, failure steps lower in every seed, and
    the lower bound of the success difference above -5 points. Refuted: the interval excludes a reduction of 10 %.
    """
    runs = [run for run in runs if run.arm in (TREATMENT, BASELINE)]
    tables, steps = paired_tables(runs), failure_steps(runs)
    tokens, success = bootstrap(list(tables.values())) if tables else (None, None)
    failed = [
        f"{run.arm}, seed {run.seed}: {gate.name} {'without a value' if gate.value is None else f'{gate.value:.2f}'}, "
        f"not {gate.condition}"
        for run in runs
        for gate in run.gates
        if not gate.passed
    ]
    if failed:
        return Verdict("void", tuple(failed), tokens, success, steps)
    if len(tables) < SEEDS or tokens is None or success is None:
        return Verdict("undecided", (f"{len(tables)} of {SEEDS} seeds have both arms",), tokens, success, steps)
    missing = _missing_to_confirm(tokens, success, steps)
    if not missing:
        return Verdict("confirmed", (), tokens, success, steps)
    if tokens.low > -EXCLUDED_REDUCTION:
        reason = f"the interval of tokens per episode excludes a reduction of {EXCLUDED_REDUCTION:.0%}"
        return Verdict("refuted", (reason,), tokens, success, steps)
    return Verdict("undecided", tuple(missing), tokens, success, steps)


def _missing_to_confirm(
    tokens: Interval, success: Interval, steps: Mapping[int, tuple[float | None, float | None]]
) -> list[str]:
    missing = []
    if tokens.value > -LEAST_REDUCTION:
        missing.append(f"tokens per episode change by {tokens.value:+.0%}, not by {-LEAST_REDUCTION:.0%} or less")
    if tokens.high >= 0:
        missing.append("the interval of tokens per episode is not below 0")
    missing += [
        f"failures of seed {seed} are not shorter"
        for seed, (ours, theirs) in steps.items()
        if ours is None or theirs is None or ours >= theirs
    ]
    if success.low <= -SUCCESS_MARGIN:
        missing.append(f"success may be lower by {-100 * success.low:.0f} points")
    return missing
