"""Bootstrap over seeds and then over the tasks of each, as 95 % intervals. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, CHUNK = 10_000, 500


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def mean_over_seeds(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over the tasks of each seed, then over seeds, which count equally.

    tables: one per seed, [tasks, ...], not empty. The result has the shape of a task.
    """
    return np.mean([table.mean(axis=0) for table in tables], axis=0)


def resample_means(tables: Sequence[np.ndarray], seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """`mean_over_seeds` of resampled tables, [resamples, ...], float64 (two-stage bootstrap).

    Draws seeds, and within each drawn seed tasks, with replacement. What a table has of one task is drawn together, so
    that comparisons within it are paired.
    """
    rng = np.random.default_rng(seed)
    means = []
    for first in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - first)
        drawn = rng.integers(0, len(tables), (count, len(tables)))
        sums = np.zeros((count, *tables[0].shape[1:]))
        for slot in drawn.T:
            for number, table in enumerate(tables):
                chosen = np.flatnonzero(slot == number)
                tasks = rng.integers(0, len(table), (len(chosen), len(table)))
                sums[chosen] += table[tasks].mean(axis=1)
        means.append(sums / len(tables))
    return np.concatenate(means)


def percentile_interval(value: float, resampled: np.ndarray) -> Interval:
    """`value` with the 2.5th and 97.5th percentile of its resamples, [resamples]."""
    low, high = (float(np.percentile(resampled, percent)) for percent in (2.5, 97.5))
    return Interval(float(value), low, high)
