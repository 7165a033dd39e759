"""Means, ranges and ratios over seeds, with censored values. Pure functions.

A censored value is a lower bound. It stays in every mean, range and ratio, which are bounds then, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 10_000

Bound = Literal["exact", "at_least", "at_most"]


@dataclass(frozen=True)
class Figure:
    """A value of one run, or of several."""

    value: float
    censored: bool = False  # the true value is at least this


@dataclass(frozen=True)
class Spread:
    """Values over seeds."""

    mean: Figure
    low: Figure
    high: Figure


@dataclass(frozen=True)
class Ratio:
    """A ratio of means over the seeds that both have, with its 95 % bootstrap interval."""

    value: float
    interval: tuple[float, float] | None  # None with fewer than two seeds
    bound: Bound  # of the value and of both ends of the interval
    seeds: int


def spread(figures: Sequence[Figure]) -> Spread:
    """Mean, least and largest of at least one value.

    With a censored value the mean and the largest are lower bounds; the least is one if no exact value is as small.
    """
    any_censored = any(figure.censored for figure in figures)
    low = min(figures, key=lambda figure: (figure.value, figure.censored))
    return Spread(
        mean=Figure(sum(figure.value for figure in figures) / len(figures), any_censored),
        low=low,
        high=Figure(max(figure.value for figure in figures), any_censored),
    )


def ratio(
    ours: Mapping[int, Figure], theirs: Mapping[int, Figure], seed: int = 0, resamples: int = RESAMPLES
) -> Ratio | None:
    """Mean of `ours` / mean of `theirs`, both by seed; None without a common seed, or if it has no bound.

    Seeds are resampled in pairs, with replacement; percentile interval, 2.5 to 97.5 (Efron 1979). Censored values only
    below the line make an upper bound, only above it a lower one; on both sides they leave the ratio unknown. The same
    holds for every resample, hence for the interval.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    above, below = (any(side[each].censored for each in seeds) for side in (ours, theirs))
    table = np.array([[side[each].value for side in (ours, theirs)] for each in seeds], np.float64)  # [seeds, 2]
    if not seeds or (above and below) or not table[:, 1].all():
        return None
    interval = None
    if len(seeds) > 1:
        drawn = np.random.default_rng(seed).integers(0, len(seeds), (resamples, len(seeds)))
        sums = table[drawn].sum(axis=1)  # [resamples, 2]
        low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
        interval = float(low), float(high)
    totals = table.sum(axis=0)
    bound: Bound = "at_most" if below else "at_least" if above else "exact"
    return Ratio(float(totals[0] / totals[1]), interval, bound, len(seeds))
