"""An engine passes its tests with model runner V2, too; `make test-v2` runs the others and these."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_model_runner_v2_an_engine_generates_updates_aborts_and_records_experts() -> None:
    files = (HERE / "test_vllm_engine.py", HERE / "test_routed_experts.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--v2", "-k", "not blocking", *map(str, files)]
    done = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-6000:]
