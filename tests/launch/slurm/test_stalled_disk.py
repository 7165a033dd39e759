"""The first node of a job when the file system of the run's folder does not answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch.run_folder import write_job
from megatron_webrl.launch.validation import load_config
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track.run_lock import start_launch
from megatron_webrl.types import is_infrastructure_failure
from megatron_webrl.util.disk_faults import INFRASTRUCTURE_EXIT_CODE
from tests.failing_files import STALL, FailingFiles
from tests.tiny_settings import SETTINGS

HOST = """
import sys
from megatron_webrl import cli
from megatron_webrl.util import disk_faults
disk_faults.TOUCH_SECONDS, disk_faults.STALL_SECONDS = 0.1, 3.0
sys.exit(cli.main(["node", "control", sys.argv[1], "--host", "127.0.0.1"]))
"""
LIMIT = 120.0


def test_a_file_system_that_stalls_beyond_the_limit_ends_the_job_to_be_requeued(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = {**SETTINGS, "model": {"path": str(tiny_model)}, "run": {"name": "x", "directory": str(tmp_path)}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    config = load_config(tmp_path / "config.yaml")
    config.cluster.base_port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    slurm = {"SLURM_JOB_ID": "17"}
    with start_launch(config.run_folder, slurm):
        pass
    write_job(config, place_processes(config))
    disk = FailingFiles(config.run_folder, tmp_path)
    command = [sys.executable, "-c", HOST, str(config.run_folder / "config.yaml")]
    with (tmp_path / "log").open("wb") as log:
        host = subprocess.Popen(command, env={**os.environ, **slurm, **disk.environment}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + LIMIT
        while "control service at" not in (tmp_path / "log").read_text():
            assert host.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client = ControlClient(config.run_folder / "control.json", "reader")
        with disk.failing(STALL):
            while (end := client.job_end()) is None:  # while the host's main thread waits for the disk
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert host.wait(LIMIT) == INFRASTRUCTURE_EXIT_CODE
    finally:
        host.kill()
        host.wait()
    assert is_infrastructure_failure(end["outcome"])
    assert f"the file system of {config.run_folder} has stalled for 3 s; the job ends" in (tmp_path / "log").read_text()
