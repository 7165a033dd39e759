"""The end of the job during the start of an engine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.launch.role_process import role_arguments
from tests.job_control import connect, control_service
from tests.waiting import until

STARTS_SECONDS, ENDS_SECONDS = 60, 60


def test_the_end_of_the_job_ends_a_worker_whose_engine_starts(tmp_path: Path, tiny_model: Path) -> None:
    config = parse_config(
        None, [f"model.path={tiny_model}", "model.platform=cpu", f"run.directory={tmp_path}", "run.name=here"]
    )
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.yaml")
    with control_service(config.run_folder) as address:
        control = connect(address, "trainer-0")
        command = [*role_arguments(config), "--worker", "0", "--weights-only"]
        log = tmp_path / "log"
        with log.open("wb") as file:
            worker = subprocess.Popen(
                [sys.executable, "-m", "megatron_webrl", "rollout", *command], stdout=file, stderr=subprocess.STDOUT
            )
        try:
            until(lambda: control.status_of("rollout-0") == "starting the engine", log.read_text, STARTS_SECONDS)
            time.sleep(1)
            control.end_job("finished")
            assert worker.wait(ENDS_SECONDS) == 0, log.read_text()
        finally:
            worker.kill()
        assert "engine started" not in log.read_text()
