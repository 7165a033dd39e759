"""`webrl eval` with a checkpoint, real vLLM and real Chromium, and with bad input."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient
from rich.console import Console

from megatron_webrl.cli import main
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.evaluation import CheckpointEvaluation, EvaluatedCheckpoint, parse_evaluation_config
from megatron_webrl.launch.first_node import FirstNode
from megatron_webrl.launch.local import run_here
from megatron_webrl.launch.run_folder import prepared_run_folder
from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import evaluations
from tests.file_faults import FileFaults
from tests.job_control import connect, control_service
from tests.launch.whole_jobs import owned

SETTINGS: dict[str, Any] = {
    "rollout": {
        "groups_in_flight": 2,
        "group_size": 2,
        "max_new_tokens": 16,
        "max_model_len": 1024,
        "kv_cache_mib": 32,
        "context": {"response_format": "bare", "compact": True},
    },
    "trainer": {"tokens_per_microbatch": 4096},
    "tasks": {"environments": ["click-test", "focus-text"], "max_steps": 2},
    "browser": {"width": 160, "height": 224, "screenshot": "png"},
    "evaluation": {"episodes": 2, "skip": 1, "after": True, "temperature": 1.0, "blank_images": True, "greedy": True},
    "ring": {"capacity_mib": 64},
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A checkpoint of the tiny model."""
    folder = tmp_path_factory.mktemp("converted") / "checkpoint"
    hf_to_megatron(tiny_model, folder, ParallelSizes(), ConversionOptions())
    return folder


@pytest.fixture
def run_folder(tmp_path: Path, converted: Path) -> Path:
    """A run's folder with a configuration and a checkpoint."""
    folder = tmp_path / "runs" / "trained"
    version = folder / "checkpoints" / "version-000007"
    version.parent.mkdir(parents=True)
    shutil.copytree(converted, version)
    (version / "state.json").write_text('{"version": 7}')
    (version.parent / "latest").write_text(version.name)
    settings = {**SETTINGS, "model": {"path": "gone"}, "run": {"name": "trained", "directory": str(tmp_path / "runs")}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def start(output: Path, *arguments: object) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-m", "megatron_webrl", "eval", *map(str, arguments)]
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def left_by(process: subprocess.Popen[bytes]) -> list[str]:
    """Processes, folders and shared memory of a command that has ended."""
    found = [str(path) for path in Path(tempfile.gettempdir()).glob(f"webrl-{process.pid}-*")]
    found += map(str, owned(process.pid))
    return found + [name for name in os.listdir("/dev/shm") if name.startswith("webrl-trained")]


@pytest.mark.slow
def test_a_runs_checkpoint_is_evaluated_and_an_interrupt_leaves_no_process(run_folder: Path, tmp_path: Path):
    report, output = tmp_path / "report.json", tmp_path / "out.log"
    process = start(output, run_folder, "--json", report)
    assert process.wait(300) == 0, output.read_text()
    found = json.loads(report.read_text())
    assert found["checkpoint"] == str(run_folder / "checkpoints" / "version-000007")
    for name, temperature in {"evaluation": 1, "blank_images": 1, "greedy": 0}.items():
        line = found[name]
        assert (line["temperature"], line["first_task"]) == (temperature, 2)
        assert (line["version"], line["versions"], line["missing"]) == (7, [7, 7], 0)
        assert line["episodes"] + sum(line["no_verdict"].values()) == 4
        assert set(line["environments"]) == {"click-test", "focus-text"}
    assert found["image_gain"]["tasks"] == 4
    for name in ("episodes", "blank_images_episodes", "greedy_episodes"):
        assert sorted(each["index"] for each in found[name]) == [2, 3, 4, 5]
    assert "click-test" in output.read_text()
    assert "95 % interval" in output.read_text()
    client = MlflowClient(f"sqlite:///{run_folder.parent / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("megatron_webrl").experiment_id])
    assert run.info.run_name == "trained-evaluation-version-000007"
    assert run.data.metrics["evaluation/success_of_judged"] == found["evaluation"]["success_of_judged"]
    assert run.data.tags["checkpoint"] == found["checkpoint"]
    assert sorted(path.name for path in run_folder.iterdir()) == ["checkpoints", "config.yaml"]
    assert not left_by(process)

    log = run_folder.with_name("trained-evaluation-version-000007") / "logs" / "rollout-0.log"
    old = log.stat().st_mtime_ns
    process = start(output, run_folder)
    deadline = time.monotonic() + 200
    while not log.is_file() or log.stat().st_mtime_ns == old:
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130, output.read_text()
    assert "interrupted" in output.read_text()
    assert not left_by(process)


SIGNALLED_WHILE_IT_CONVERTS = """
import os, runpy, signal, sys

def signal_at_first_weights(event, arguments):
    if event == "open" and "/model" in str(arguments[0]) and str(arguments[0]).endswith((".safetensors", ".writing")):
        signal.raise_signal(number.pop()) if number else None

number = [int(sys.argv.pop(1))]
sys.addaudithook(signal_at_first_weights)
runpy.run_module("megatron_webrl", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_conversion_leaves_no_weights(run_folder: Path, tmp_path: Path, number: int) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", SIGNALLED_WHILE_IT_CONVERTS, str(int(number)), "eval", str(run_folder)]
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(scratch)}, timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == 128 + number, done.stderr
    assert not list(scratch.glob("webrl-*"))


def run_without_workers(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    console: Console,
    evaluation: CheckpointEvaluation,
    disk_fault: int = 0,
) -> int:
    """Evaluate; the first episode is claimed, and never ends.

    `disk_fault`: file operation of the evaluation from which on the disk is full; 0: none.
    """

    def run_until_end(node: FirstNode) -> str:
        with control_service(node.scratch) as address:
            control = connect(address, "host")

            def claim_first() -> None:
                request = evaluations.current_request(control)
                assert request is not None
                control.claim(evaluations.queue_name(request), "rollout-0.1", 1)

            with FileFaults(config.run_folder, disk_fault, errno.ENOSPC, until=1_000_000):
                return evaluation.run(control, claim_first, lambda progress: None)

    monkeypatch.setattr(FirstNode, "_run_until_end", run_until_end)
    return run_here(config, console, evaluation)


def test_missing_episodes_are_an_error_after_the_results(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    checkpoint, text = EvaluatedCheckpoint.resolve(run_folder), StringIO()
    one = ["evaluation.blank_images=false", "evaluation.temperature=0"]  # greedy already
    config = parse_evaluation_config(checkpoint, ["evaluation.timeout_seconds=0.5", *one])
    with subprocess.Popen(["sleep", "600"]) as mine:
        evaluation = CheckpointEvaluation(config, checkpoint)
        assert run_without_workers(monkeypatch, config, Console(file=text), evaluation) == 1
        assert mine.poll() is None, "a launcher ends what it has started"
        mine.kill()
    # A busy machine makes the new database of MLflow late, and the job says so.
    *_, results, last = (line for line in text.getvalue().splitlines() if not line.startswith("MLflow at "))
    assert results == f"results: {config.run_folder / 'evaluations.jsonl'}"
    assert last.startswith("failed: 4 of 4 episodes are missing after 0.5 s (evaluation.timeout_seconds); raise it")
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"] == last


@pytest.mark.parametrize("name", ["report.json", "gone/report.json"])
def test_results_for_which_the_disk_has_no_room_are_printed_before_the_error(
    run_folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    checkpoint, text, report = EvaluatedCheckpoint.resolve(run_folder), StringIO(), tmp_path / name
    config = parse_evaluation_config(checkpoint, ["evaluation.timeout_seconds=0.5"])
    console = Console(file=text, width=400)
    assert run_without_workers(monkeypatch, config, console, CheckpointEvaluation(config, checkpoint, report), 1) == 1
    path, output = config.run_folder / "evaluations.jsonl", text.getvalue()
    problems = f"{path} cannot be written: No space left on device"
    if name == "report.json":
        assert json.loads(report.read_text())["evaluation"]["missing"] == 4
        assert f"results: {report}" in output
    else:
        problems += f"; {report} cannot be written: No such file or directory"
        assert "results: " not in output
    assert "sampled" in output
    assert output.splitlines()[-1] == f"failed: {problems}"
    assert "mlflow.json cannot be written: [Errno 28]" in caplog.text


def test_the_folder_of_a_running_evaluation_is_left_alone(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = EvaluatedCheckpoint.resolve(run_folder)
    config = parse_evaluation_config(checkpoint, [])
    folder, renamed = config.run_folder, config.run_folder.with_name(f"{config.run_folder.name}.1")
    folder.mkdir()
    with control_service(folder):
        assert main(["eval", str(run_folder)]) == 2
        assert f"run.name={folder.name}: a job runs in {folder}, its control service at" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=r"wait for its end, or choose another run\.name"):
            run_here(config, Console(file=StringIO()), CheckpointEvaluation(config, checkpoint))
        assert not list(Path(tempfile.gettempdir()).glob(f"webrl-{os.getpid()}-*"))
        assert not renamed.exists()
    with prepared_run_folder(config, place_processes(config), lambda message: None):
        pass
    assert renamed.is_dir()


def test_the_checkpoints_run_gives_the_configuration_and_overrides_replace_it(
    run_folder: Path, tiny_model: Path, tmp_path: Path
):
    checkpoint = EvaluatedCheckpoint.resolve(run_folder)
    assert (checkpoint.path.name, checkpoint.is_megatron, checkpoint.version) == ("version-000007", True, 7)
    assert (
        EvaluatedCheckpoint.resolve(checkpoint.path)
        == EvaluatedCheckpoint.resolve(run_folder / "checkpoints")
        == checkpoint
    )
    config = parse_evaluation_config(checkpoint, ["evaluation.episodes=5", "evaluation.blank_images=false"])
    assert (config.run.name, config.evaluation.episodes, config.evaluation.blank_images) == (
        "trained-evaluation-version-000007", 5, False,
    )  # fmt: skip
    assert config.model.path == str(checkpoint.path / "hf")
    folder = EvaluatedCheckpoint.resolve(tiny_model)
    assert (folder.is_megatron, folder.version) == (False, 0)
    assert parse_evaluation_config(folder, [str(run_folder / "config.yaml")]).model.path == str(tiny_model)
    with pytest.raises(ConfigError, match="is not in a run's checkpoints folder; name a configuration after it"):
        parse_evaluation_config(folder, ["evaluation.episodes=5"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "nowhere is neither a Hugging Face folder (no config.json) nor a checkpoint: nowhere is no "),
        (
            ["RUN", "--samples", "4", "--temperature", "0"],
            "evaluation.samples=4 with evaluation.temperature=0 repeats the same episode",
        ),
        (["RUN", "--temperature", "hot"], "evaluation.temperature: Value 'hot'"),
        (["RUN", "tasks.environments=[click-tset]"], "near: click-test"),
        (["RUN", "missing.yaml"], "configuration missing.yaml is not a file"),
        (["RUN", "--json", "/no/such/folder/file.json"], "--json=/no/such/folder/file.json: /no/such/folder is not a"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(
    run_folder: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", *(str(run_folder) if argument == "RUN" else argument for argument in arguments)]) == 2
    output = capsys.readouterr()
    assert error in output.err
    assert (output.err.count("\n"), output.out) == (1, "")
    assert not run_folder.with_name("trained-evaluation-version-000007").exists()


def test_a_damaged_checkpoint_is_one_line(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    [file, *_] = sorted((run_folder / "checkpoints" / "version-000007" / "megatron").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    before = set(Path(tempfile.gettempdir()).glob(f"webrl-{os.getpid()}-*"))
    assert main(["eval", str(run_folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert set(Path(tempfile.gettempdir()).glob(f"webrl-{os.getpid()}-*")) == before
