"""`webrl eval` of a checkpoint without workers, and with bad input; with them: tests/launch/slurm, test_webgym.py."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_webrl.cli import main
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.evaluation import CheckpointEvaluation, EvaluatedCheckpoint, parse_evaluation_config
from megatron_webrl.launch.first_node import FirstNode
from megatron_webrl.launch.local import run_here
from megatron_webrl.launch.run_folder import prepared_run_folder
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.track import evaluations
from tests.file_faults import FileFaults
from tests.job_control import connect, control_service
from tests.launch.whole_jobs import make_run

EVALUATION = {"episodes": 2, "skip": 1, "after": True, "temperature": 1.0, "blank_images": True, "greedy": True}


@pytest.fixture
def run_folder(tmp_path: Path, checkpoint: Path) -> Path:
    run = {"name": "trained", "directory": str(tmp_path / "runs")}
    return make_run(tmp_path / "runs" / "trained", checkpoint, model={"path": "gone"}, run=run, evaluation=EVALUATION)


def scratch_folders() -> set[Path]:
    """The folders for temporary files that this process has made."""
    return set(Path(tempfile.gettempdir()).glob(f"webrl-{os.getpid()}-*"))


SIGNALLED_WHILE_IT_CONVERTS = """
import os, runpy, signal, sys

def signal_at_first_weights(event, arguments):
    if event == "open" and "/model" in str(arguments[0]) and str(arguments[0]).endswith((".safetensors", ".writing")):
        signal.raise_signal(number.pop()) if number else None

number = [signal.SIGTERM]
sys.addaudithook(signal_at_first_weights)
runpy.run_module("megatron_webrl", run_name="__main__", alter_sys=True)
"""


def test_a_signal_during_the_conversion_leaves_no_weights(run_folder: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", SIGNALLED_WHILE_IT_CONVERTS, "eval", str(run_folder)]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(scratch)}, timeout=120, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert not list(scratch.glob("webrl-*"))


def run_without_workers(
    monkeypatch: pytest.MonkeyPatch, config: Config, evaluation: CheckpointEvaluation, disk_fault: int = 0
) -> tuple[int, str]:
    """Evaluate; the first episode is claimed, and never ends. Returns the exit code and what was printed.

    `disk_fault`: file operation of the evaluation from which on the disk is full; 0: none.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    text = StringIO()

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
    return run_here(config, Console(file=text, width=400), evaluation), text.getvalue()


def test_missing_episodes_are_an_error_after_the_results(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = EvaluatedCheckpoint.resolve(run_folder)
    one = ["evaluation.blank_images=false", "evaluation.temperature=0"]  # greedy already
    config = parse_evaluation_config(checkpoint, ["evaluation.timeout_seconds=0.5", *one])
    with subprocess.Popen(["sleep", "600"]) as mine:
        code, text = run_without_workers(monkeypatch, config, CheckpointEvaluation(config, checkpoint))
        assert code == 1
        assert mine.poll() is None, "a launcher ends what it has started"
        mine.kill()
    # A busy machine makes the new database of MLflow late, and the job says so.
    *_, results, last = (line for line in text.splitlines() if not line.startswith("MLflow at "))
    assert results == f"results: {config.run_folder / 'evaluations.jsonl'}"
    assert last.startswith("failed: 4 of 4 episodes are missing after 0.5 s (evaluation.timeout_seconds); raise it")
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"] == last


@pytest.mark.parametrize("name", ["report.json", "gone/report.json"])
def test_results_for_which_the_disk_has_no_room_are_printed_before_the_error(
    run_folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    checkpoint, report = EvaluatedCheckpoint.resolve(run_folder), tmp_path / name
    config = parse_evaluation_config(checkpoint, ["evaluation.timeout_seconds=0.5"])
    evaluation = CheckpointEvaluation(config, checkpoint, report)
    code, output = run_without_workers(monkeypatch, config, evaluation, disk_fault=1)
    assert code == 1
    path = config.run_folder / "evaluations.jsonl"
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
    before = scratch_folders()
    with control_service(folder):
        assert main(["eval", str(run_folder)]) == 2
        assert f"run.name={folder.name}: a job runs in {folder}, its control service at" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=r"wait for its end, or choose another run\.name"):
            run_here(config, Console(file=StringIO()), CheckpointEvaluation(config, checkpoint))
        assert scratch_folders() == before
        assert not renamed.exists()
    with prepared_run_folder(config, place_processes(config), lambda message: None):
        pass
    assert renamed.is_dir()


def test_the_checkpoints_run_gives_the_configuration_and_overrides_replace_it(
    run_folder: Path, tiny_model: Path, tmp_path: Path
):
    checkpoint = EvaluatedCheckpoint.resolve(run_folder)
    assert (checkpoint.path.name, checkpoint.is_megatron, checkpoint.version) == ("version-000007", True, 7)
    assert EvaluatedCheckpoint.resolve(checkpoint.path) == checkpoint
    assert EvaluatedCheckpoint.resolve(run_folder / "checkpoints") == checkpoint
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


def test_bad_input_is_one_line_before_anything_starts(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    run, before = str(run_folder), scratch_folders()
    [file, *_] = sorted((run_folder / "checkpoints" / "version-000007" / "megatron").glob("*.distcp"))
    for arguments, words in (
        (["nowhere"], "nowhere is neither a Hugging Face folder (no config.json) nor a checkpoint"),
        ([run, "--samples", "4", "--temperature", "0"], "evaluation.samples=4 with evaluation.temperature=0"),
        ([run, "--temperature", "hot"], "evaluation.temperature: Value 'hot'"),
        ([run, "tasks.environments=[click-tset]"], "near: click-test"),
        ([run, "missing.yaml"], "configuration missing.yaml"),
        ([run, "--json", "/no/such/folder/file.json"], "--json=/no/such/folder/file.json"),
        ([run], "version-000007"),  # damaged
    ):
        if words == "version-000007":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert main(["eval", *arguments]) == 2
        output = capsys.readouterr()
        assert words in output.err
        assert (output.err.count("\n"), output.out) == (1, "")
    assert scratch_folders() == before
    assert not any(run_folder.with_name("trained-evaluation-version-000007").glob("*.safetensors"))
