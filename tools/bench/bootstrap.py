"""Bootstrap crossed over seeds and tasks, as 95 % intervals. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 10_000
PERCENT = 2.5, 97.5
Z = 1.959963984540054  # of the normal distribution at 97.5 %


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def crossed_interval(table: np.ndarray, resamples: int = RESAMPLES) -> Interval:
    """The mean of `table`, float64 [seeds, tasks], with its interval over other seeds and other tasks.

    Seeds and tasks are resampled with replacement, independently: all seeds of a resample share its tasks, as those of
    the table do (pigeonhole bootstrap: Owen, The pigeonhole bootstrap, Annals of Applied Statistics, 2007). The
    deviations of the resampled means are then scaled by

        sqrt(V / variance of the resampled means) * t / z

    V: `mean_variance`, because a resample has the noise of a cell up to three times; t: the quantile of Student's
    distribution with V's degrees of freedom, z: that of the normal distribution. With one seed the interval is over
    tasks alone, with one task over seeds; without a second of either it has no width.

    In simulations with normal effects of seeds, tasks and noise the coverage is .94 to .96 from 8 seeds on, and .93 to
    .95 with 5. It does not hold with 3 (.92 to .95) or 2 (.88 to .94), and is .96 to .98 where seeds have no effect,
    because V cannot tell so from few seeds.
    """
    value = float(table.mean())
    variance, freedom = mean_variance(table)
    deviations = resampled_means(table, resamples) - value
    spread = np.mean(deviations**2)
    if not spread:
        return Interval(value, value, value)
    scale = np.sqrt(variance / spread) * student_quantile(freedom) / Z
    low, high = value + scale * np.percentile(deviations, PERCENT)
    return Interval(value, float(low), float(high))


def resampled_means(table: np.ndarray, resamples: int = RESAMPLES) -> np.ndarray:
    """Means of crossed resamples of `table`, [seeds, tasks]: float64 [resamples]."""
    seeds, tasks = (_shares(resamples, size, axis) for axis, size in enumerate(table.shape))
    return ((tasks @ table.T) * seeds).sum(axis=1)


@lru_cache(maxsize=4)
def _shares(resamples: int, size: int, seed: int) -> np.ndarray:
    """Share of each of `size` items in each resample, float64 [resamples, size]."""
    return np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), resamples) / size


def mean_variance(table: np.ndarray) -> tuple[float, float]:
    """Variance of the mean of `table`, [seeds, tasks], and its degrees of freedom (Satterthwaite, 1946).

    y = m + seed effect + task effect + noise, all independent with a mean of 0. With the mean squares of a two-way
    analysis of variance, whose expectations are T s_seed^2 + s_noise^2, S s_task^2 + s_noise^2 and s_noise^2, the
    variance is estimated by (MS_seed + MS_task - MS_noise) / (S T); a component below 0 counts as 0.
    """
    seeds, tasks = table.shape
    by_seed, by_task = table.mean(axis=1, keepdims=True), table.mean(axis=0, keepdims=True)
    if min(seeds, tasks) == 1:
        means = (by_task if seeds == 1 else by_seed).ravel()
        return (float(means.var(ddof=1)) / means.size, means.size - 1) if means.size > 1 else (0.0, 1)
    noise_freedom = (seeds - 1) * (tasks - 1)
    noise = float(((table - by_seed - by_task + table.mean()) ** 2).sum()) / noise_freedom
    squares = [(tasks * float(by_seed.var(ddof=1)), seeds - 1), (seeds * float(by_task.var(ddof=1)), tasks - 1)]
    kept = [(square, freedom) for square, freedom in squares if square > noise]
    total = sum(square for square, _ in kept) + (1 - len(kept)) * noise
    spread = sum(square**2 / freedom for square, freedom in kept) + ((1 - len(kept)) * noise) ** 2 / noise_freedom
    return total / table.size, total**2 / spread if spread else 1.0


def student_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution, within 1 % from 2 degrees of freedom on, 11 % too small for 1.

    Expansion in 1 / freedom (Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, 26.7.5).
    """
    powers = Z ** np.array([1, 3, 5, 7, 9])
    terms = {4: (1, 1, 0, 0, 0), 96: (3, 16, 5, 0, 0), 384: (-15, 17, 19, 3, 0), 92160: (-945, -1920, 1482, 776, 79)}
    return Z + float(sum(powers @ term / divisor / freedom**n for n, (divisor, term) in enumerate(terms.items(), 1)))
