"""A whole job with secrets whose judge's budget is spent, and the run that resumes it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_webrl.judge.budget import HOUR_SECONDS, USAGE_FILE, read_usage
from megatron_webrl.types import BUDGET_SPENT
from tests.launch.canaries import search_job
from tests.launch.whole_jobs import Job, assert_nothing_left
from tests.track.mlflow_server import mlflow_server
from tools.judge_endpoint.process import endpoint_process, stats_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CALLS = 7  # an update of four episodes takes at least four


def hour() -> int:
    return int(time.time() // HOUR_SECONDS)


def test_a_spent_budget_ends_the_job_with_a_checkpoint_and_the_run_that_resumes_and_no_secret_leaves_it(
    job: Job, tmp_path: Path
):
    """A smaller test could not show that the trainer keeps what the workers of a job have counted, nor that no library
    of any role prints or stores a secret: in a browser, a command line, a file or MLflow.
    """
    with mlflow_server(tmp_path / "mlflow") as server, endpoint_process(tmp_path) as url:
        budget = f"judge.budget.calls_per_hour={CALLS}"
        began = hour()
        found = search_job(job, server, url, 20, budget)
        assert found.passed, f"{found}\n{job.output()}"
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

        judged = (
            "judge.evaluators=[judge]", "judge.verdict.name=oracle", f"judge.verdict.url={url}",
            "judge.verdict.key_variable=JUDGE_KEY",
        )  # fmt: skip
        environment = {"MLFLOW_TRACKING_URI": server.uri, "JUDGE_KEY": "a-key-of-the-tests"}
        job.start(*judged, budget, "trainer.updates=20", "run.resume=true", environment=environment)
        assert job.wait(300) == 0, job.output()
        assert job.summary()["outcome"] == BUDGET_SPENT
        if began == hour():
            assert stats_of(url)["requests"] <= CALLS
    assert len(job.summary()["updates"]) >= done
    assert_nothing_left(job)
