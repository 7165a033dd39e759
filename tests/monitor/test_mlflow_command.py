"""`webrl mlflow`: a real MLflow over the store of a run. Its pages are not in the client's package, its answers are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.schema import Config
from megatron_webrl.monitor.mlflow_command import INSTALL
from megatron_webrl.track.mlflow_upload import Uploader, run_id
from tests.monitor.runs import write_run
from tests.waiting import until

PROGRAM = Path(sys.executable).parent / "mlflow"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = write_run(tmp_path_factory.mktemp("runs"))
    Uploader(config).send()
    return config


def command(*arguments: object) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_webrl", "mlflow", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = probe.getsockname()[1]
    return int(number)


def test_mlflow_is_served_with_a_link_to_the_run_and_ends_with_the_command(run: Config, port: int):
    process = command(run.run_folder, "--port", port, "--mlflow", PROGRAM)
    try:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("open ")).removeprefix("open ").strip()
        assert address.startswith(f"http://127.0.0.1:{port}/#/experiments/")
        assert address.endswith(f"/runs/{run_id(run.run_folder)}")
        answer = f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/get?run_id={run_id(run.run_folder)}"
        content = urllib.request.urlopen(answer, timeout=30).read().decode()
        assert f"`webrl monitor {run.run_folder}`" in content, "the description of the run says how to look at it"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        assert not any("sqlite:" in part for child in children for part in child.cmdline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        until(lambda: not any(child.is_running() for child in children), "the end of MLflow")
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_served_is_refused_in_one_line(
    run: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    other = write_run(tmp_path)
    remote = write_run(tmp_path, name="remote")
    (remote.run_folder / "config.yaml").write_text("tracking: {uri: 'https://me:a-long-password@mlflow.test'}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, words in (
            ((run.run_folder,), INSTALL),
            ((), "no run has logged to it"),
            ((other.run_folder,), "no run has logged to it"),
            ((remote.run_folder,), "https://***@mlflow.test is an MLflow server with pages of its own"),
            ((run.run_folder, "--mlflow", tmp_path / "none"), "is not a program"),
            ((run.run_folder, "--mlflow", PROGRAM, "--port", taken.getsockname()[1]), "cannot listen"),
            ((run.run_folder, "--mlflow", PROGRAM, "--port", 99_999), "cannot listen"),
            ((tmp_path,), "has no config.yaml"),
        ):
            assert main(["mlflow", *map(str, arguments)]) == 2
            errors = capsys.readouterr().err
            assert words in errors
            assert errors.count("\n") == 1
