"""`webrl eval` of a checkpoint without workers, and with bad input; with them: tests/launch/slurm, test_webgym.py."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import tempfile
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_webrl.cli import main
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.evaluation import CheckpointEvaluation, EvaluatedCheckpoint, parse_evaluation_config
from megatron_webrl.launch.first_node import FirstNode
from megatron_webrl.launch.local import run_here
from megatron_webrl.model.convert import conversion
from megatron_webrl.model.convert.hf_files import write_hf_model
from megatron_webrl.track import evaluations
from tests.file_faults import FileFaults
from tests.job_control import connect, control_service
from tests.launch.whole_jobs import make_run

EVALUATION = {"episodes": 2, "skip": 1, "after": True, "temperature": 1.0, "blank_images": True, "greedy": True}


@pytest.fixture
def run_folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    run = {"name": "trained", "directory": str(tmp_path / "runs")}
    tracking = {"uri": f"sqlite:///{tmp_path_factory.getbasetemp()}/mlflow.db"}  # a new one takes seconds
    return make_run(
        tmp_path / "runs" / "trained", checkpoint, model={"path": "gone"}, run=run, evaluation=EVALUATION,
        tracking=tracking,
    )  # fmt: skip


def scratch_folders() -> set[Path]:
    """The folders for temporary files that this process has made."""
    return set(Path(tempfile.gettempdir()).glob(f"webrl-{os.getpid()}-*"))


def test_a_signal_during_the_conversion_leaves_no_weights(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, written = scratch_folders(), []

    def write_and_signal(folder: Path, *arguments: Any) -> None:
        write_hf_model(folder, *arguments)
        written.extend(folder.glob("*.safetensors"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(conversion, "write_hf_model", write_and_signal)
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(run_folder)])
    assert ended.value.code == 128 + signal.SIGTERM
    assert written
    assert scratch_folders() == before
    assert not any(path.exists() for path in written)


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
    judged = ["judge.evaluators=[judge]"]
    config = parse_evaluation_config(checkpoint, ["evaluation.timeout_seconds=0.5", *one, *judged])
    with subprocess.Popen(["sleep", "600"]) as mine:
        code, text = run_without_workers(monkeypatch, config, CheckpointEvaluation(config, checkpoint))
        assert code == 1
        assert mine.poll() is None, "a launcher ends what it has started"
        mine.kill()
    assert "by published denominators: WebGym - of 0, AsyncWebRL - of 0" in text
    # A busy machine makes the new database of MLflow late, and the job says so.
    *_, results, last = (line for line in text.splitlines() if not line.startswith("MLflow at "))
    assert results == f"results: {config.run_folder / 'evaluations.jsonl'}"
    assert last.startswith("failed: 4 of 4 episodes are missing after 0.5 s (evaluation.timeout_seconds); raise it")
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"] == last


def test_results_for_which_the_disk_has_no_room_are_printed_before_the_error(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    checkpoint, report = EvaluatedCheckpoint.resolve(run_folder), tmp_path / "report.json"
    config = parse_evaluation_config(checkpoint, ["evaluation.timeout_seconds=0.5"])
    evaluation = CheckpointEvaluation(config, checkpoint, report)
    code, output = run_without_workers(monkeypatch, config, evaluation, disk_fault=1)
    assert code == 1
    path = config.run_folder / "evaluations.jsonl"
    assert json.loads(report.read_text())["evaluation"]["missing"] == 4
    assert f"results: {report}" in output
    assert "sampled" in output
    assert output.splitlines()[-1] == f"failed: {path} cannot be written: No space left on device"
    assert "mlflow.json cannot be written: [Errno 28]" in caplog.text


def test_the_checkpoints_run_gives_the_configuration_with_overrides(run_folder: Path, tiny_model: Path, tmp_path: Path):
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
