"""How fast a run goes: worked by hand."""

from __future__ import annotations

import pytest

from megatron_webrl.monitor.progress import WINDOW, recent_progress
from tests.monitor.runs import updates


def test_the_figures_of_the_last_updates() -> None:
    made = updates(20, ended=10_000.0)
    found = recent_progress(made, group_size=4, since=0.0)
    assert found is not None
    assert found.updates == WINDOW
    assert found.seconds_per_update == pytest.approx(36.0)
    assert found.updates_per_hour == pytest.approx(100.0)
    assert found.episodes_per_hour == pytest.approx(100 * (8 * 4 - 2))  # masked episodes are not trained
    assert found.tokens_per_second == pytest.approx(1000.0)
    assert found.wait_fraction == pytest.approx(0.25)
    assert (found.staleness_mean, found.staleness_max) == (1.5, 2)


def test_all_time_between_updates_counts_but_that_between_two_jobs() -> None:
    made = updates(3, ended=10_000.0)
    made[2]["finished_at"] += 36.0  # a checkpoint, an evaluation
    found = recent_progress(made, 4, 0.0)
    assert found is not None
    assert found.seconds_per_update == pytest.approx((36 + 36 + 72) / 3)
    assert found.tokens_per_second == pytest.approx(1000 * 3 / 4)
    made = updates(4, ended=10_000.0)
    for update in made[:2]:
        update["finished_at"] -= 5000.0
    found = recent_progress(made, 4, since=9_950.0)
    assert found is not None
    assert (found.updates, found.seconds_per_update) == (2, pytest.approx(36.0))
    assert recent_progress(made, 4, since=10_001.0) is None
    assert recent_progress([], 4, 0.0) is None


def test_success_is_weighted_by_episodes() -> None:
    made = updates(2, ended=100.0)
    made[0]["extra"] |= {"rollout_success_rate": 1.0, "rollout_episodes": 192.0}
    found = recent_progress(made, 4, 0.0)
    assert found is not None
    assert found.success == pytest.approx((192 + 16) / 256)
    for update in made:
        del update["extra"]["rollout_success_rate"]
    assert (recent_progress(made, 4, 0.0) or found).success is None
