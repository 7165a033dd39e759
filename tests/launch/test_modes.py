"""Whole jobs in the modes that make each batch with fixed weights. The other tests of jobs are of mode `async`."""

from __future__ import annotations

import pytest

from tests.launch.whole_jobs import Job
from tests.monitor.finished_jobs import check_timeline

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("mode", "stepping", "lags"), [("sync", "lockstep", [0, 0, 0]), ("one_step_off", "free", [0, 1, 1])]
)
def test_each_batch_is_generated_by_one_version_with_the_staleness_of_the_mode(
    job: Job,
    mode: str,
    stepping: str,
    lags: list[int],
) -> None:
    job.start(
        f"rollout.mode={mode}",
        f"rollout.stepping={stepping}",
        "rollout.max_staleness=2",  # the default, which the mode replaces
        "trainer.updates=3",
        "tracking.timeline=true",
    )
    assert job.wait(500) == 0, job.output()
    summary = job.summary()
    updates = summary["updates"]
    assert [update["staleness_max"] for update in updates] == lags
    assert [update["staleness_mean"] for update in updates] == lags
    assert {update["extra"]["versions_per_step"] for update in updates} == {1.0}
    assert all(0 < update["extra"]["engine/idle_fraction"] < 1 for update in updates)
    assert all(
        0 < update["extra"]["engine/running_requests"] <= update["extra"]["engine/running_episodes"]
        for update in updates
    )
    accounting = summary["accounting"]
    assert accounting["matches"], accounting
    assert accounting["tokens"]["trained"] > 0
    check_timeline(job.run_folder, {"trainer-0", "rollout-0"})
    assert job.process is not None
    assert not job.processes()
    assert not job.rings()
