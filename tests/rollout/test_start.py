"""The end of the job while a worker starts its engine or records demonstrations."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.launch.roles import role_command
from megatron_webrl.launch.run_folder import write_job
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.rollout import main
from tests.job_control import connect, control_service
from tests.waiting import until

STARTS_SECONDS, ENDS_SECONDS = 60, 60


async def test_the_end_of_the_job_ends_what_a_worker_waits_for(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        control = connect(address, "rollout-0")
        short, long = (asyncio.create_task(asyncio.sleep(seconds, "done")) for seconds in (0, 3600))
        assert await main.unless_job_ends(control, short) == "done"
        connect(address, "trainer-0").end_job("finished")
        with pytest.raises(JobEnded):
            await asyncio.wait_for(main.unless_job_ends(control, long), ENDS_SECONDS)
        long.cancel()
        control.close()


def test_the_end_of_the_job_ends_a_worker_whose_engine_starts(tmp_path: Path, tiny_model: Path) -> None:
    config = parse_config(
        None, [f"model.path={tiny_model}", "model.platform=cpu", f"run.directory={tmp_path}", "run.name=here"]
    )
    config.run_folder.mkdir()
    write_job(config, place_processes(config))
    with control_service(config.run_folder) as address:
        control = connect(address, "trainer-0")
        command = role_command(config.run_folder, "rollout-0", "--weights-only")
        log = tmp_path / "log"
        with log.open("wb") as file:
            worker = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            until(lambda: control.status_of("rollout-0") == "starting the engine", log.read_text, STARTS_SECONDS)
            time.sleep(1)
            control.end_job("finished")
            assert worker.wait(ENDS_SECONDS) == 0, log.read_text()
        finally:
            worker.kill()
        assert "engine started" not in log.read_text()
