"""A whole job whose judge's budget is spent, and the run that resumes it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_webrl.judge.budget import HOUR_SECONDS, USAGE_FILE, read_usage
from megatron_webrl.types import BUDGET_SPENT
from tests.launch.whole_jobs import Job, assert_nothing_left
from tools.judge_endpoint.process import endpoint_process, stats_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CALLS = 7  # an update of four episodes takes at least four


def hour() -> int:
    return int(time.time() // HOUR_SECONDS)


def test_a_spent_budget_ends_the_job_with_a_checkpoint_and_the_run_that_resumes_at_once(job: Job, tmp_path: Path):
    """A smaller test could not show that the trainer keeps what the workers of a job have counted."""
    with endpoint_process(tmp_path) as url:
        judged = [
            "judge.evaluators=[judge]", "judge.verdict.name=oracle", f"judge.verdict.url={url}",
            f"judge.budget.calls_per_hour={CALLS}",
        ]  # fmt: skip
        began = hour()
        job.start(*judged, "trainer.updates=20")
        assert job.wait(300) == 0, job.output()
        stopped = job.summary()
        assert stopped["outcome"] == BUDGET_SPENT
        assert stopped["accounting"]["matches"]
        done = json.loads(Path(stopped["checkpoint"], "state.json").read_text())["version"]
        assert done == len(stopped["updates"])
        assert_nothing_left(job)
        sent = stats_of(url)["requests"]
        if began == hour():  # else the budget began again meanwhile
            assert sent <= CALLS
            assert read_usage(job.run_folder / USAGE_FILE)[1].calls == sent

        job.start(*judged, "trainer.updates=20", "run.resume=true")
        assert job.wait(300) == 0, job.output()
        assert job.summary()["outcome"] == BUDGET_SPENT
        if began == hour():
            assert stats_of(url)["requests"] <= CALLS
    assert len(job.summary()["updates"]) >= done
    assert_nothing_left(job)
