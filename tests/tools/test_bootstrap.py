"""Intervals over seeds and tasks: their coverage in simulations, and the variance that they rest on."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench.bootstrap import Interval, crossed_interval, mean_variance, resampled_means, student_quantile


def simulated(rng: np.random.Generator, seeds: int, tasks: int, effects: tuple[float, float, float]) -> np.ndarray:
    """A table of a mean of 0 with normal effects of seeds, of tasks and of both together."""
    shapes = (seeds, 1), (1, tasks), (seeds, tasks)
    parts = [size * rng.normal(size=shape) for size, shape in zip(effects, shapes, strict=True)]
    return sum(parts, np.zeros((seeds, tasks)))


@pytest.mark.parametrize("effects", [(1.0, 1.0, 1.0), (0.15, 1.0, 1.0), (0.2, 0.3, 1.0), (1.0, 0.1, 0.1)])
def test_95_percent_intervals_cover_the_mean_of_other_seeds_and_tasks(effects: tuple[float, float, float]):
    rng, covered, count = np.random.default_rng(0), 0, 5000
    for _ in range(count):
        interval = crossed_interval(simulated(rng, 10, 60, effects), resamples=500)
        covered += interval.low <= 0 <= interval.high
    assert 0.94 <= covered / count <= 0.96


def test_the_variance_of_the_mean_is_unbiased_where_no_component_is_0():
    rng, effects = np.random.default_rng(1), (0.5, 0.7, 1.0)
    estimates = [mean_variance(simulated(rng, 8, 30, effects))[0] for _ in range(3000)]
    expected = effects[0] ** 2 / 8 + effects[1] ** 2 / 30 + effects[2] ** 2 / 240
    assert np.mean(estimates) == pytest.approx(expected, rel=0.03)


def test_all_seeds_of_a_resample_share_its_tasks():
    """A task effect alone: with tasks of their own for each seed the resampled means would vary less."""
    table = np.tile(np.arange(30.0), (5, 1))
    assert resampled_means(table).var() == pytest.approx(table[0].var() / 30, rel=0.05)


def test_one_seed_has_an_interval_over_tasks_and_one_value_of_each_seed_one_over_seeds():
    values = np.array([0.0, 1.0, 0.0, 1.0, 1.0])
    for table in (values[None], values[:, None]):
        interval = crossed_interval(table)
        half = student_quantile(4) * values.std(ddof=1) / np.sqrt(5)
        assert interval.value == pytest.approx(0.6)
        assert (interval.low, interval.high) == pytest.approx((0.6 - half, 0.6 + half), abs=0.1)
    for table in (np.array([[0.25]]), np.full((3, 4), 0.25)):
        assert crossed_interval(table) == Interval(0.25, 0.25, 0.25)


def test_the_quantile_of_students_distribution_is_that_of_its_table():
    expected = {2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 60: 2.000}
    assert [student_quantile(freedom) for freedom in expected] == pytest.approx([*expected.values()], rel=0.01)
