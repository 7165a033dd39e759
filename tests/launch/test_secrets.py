"""Secrets of a whole job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.whole_jobs import Job, assert_nothing_left
from tests.tracking.mlflow_server import mlflow_server
from tools.drills.canaries import search_job
from tools.judge_endpoint.process import endpoint_process


@pytest.mark.slow
def test_no_secret_of_a_job_reaches_a_browser_a_command_line_a_file_or_mlflow(job: Job, tmp_path: Path):
    """A smaller test could not show that no library of any role prints or stores one."""
    with mlflow_server(tmp_path / "mlflow") as server, endpoint_process(tmp_path) as url:
        found = search_job(job, server, url, updates=1)
    assert found.passed, f"{found}\n{job.output()}"
    assert_nothing_left(job)


@pytest.mark.parametrize(
    "setting",
    [
        "tracking.uri=http://someone:canary-password@mlflow:5000",
        "tracking.uri=https://canary-password@mlflow",
        "browser.farm=http://someone:canary-password@node7:8700",
        "judge.verdict.url=http://someone:canary-password@judge/v1",
        "judge.verdict.options={extra_headers: {Authorization: canary-password}}",
        "judge.verdict.options={extra_body: {api_key: canary-password}}",
    ],
)
def test_a_setting_that_holds_a_secret_is_refused_and_not_repeated(setting: str, tmp_path: Path, tiny_model: Path):
    (tmp_path / "config.yaml").write_text(json.dumps({"model": {"path": str(tiny_model)}}))
    command = [sys.executable, "-m", "megatron_webrl", "train", str(tmp_path / "config.yaml"), setting, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"webrl: {setting.partition('=')[0]} ")
    assert "canary-password" not in done.stderr + done.stdout
