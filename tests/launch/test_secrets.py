"""Settings that would hold a secret; test_judge_budget.py searches a whole job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "setting",
    [
        "tracking.uri=http://someone:canary-password@mlflow:5000",
        "tracking.uri=https://canary-password@mlflow",
        "browser.servers=http://someone:canary-password@node7:8700",
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
