"""Evaluations over several nodes: what runs where, and how the first node collects results and ends the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.control.client import POLL_SECONDS
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.launch.evaluation import (
    EvaluatedCheckpoint,
    EvaluationJob,
    convert_checkpoint,
    parse_evaluation_config,
)
from megatron_webrl.launch.roles import process_specs
from megatron_webrl.launch.run_folder import control_address_path, wait_for_control_address
from megatron_webrl.launch.slurm.prepare import plan_processes, read_launches
from megatron_webrl.launch.validation import load_config
from megatron_webrl.model import parameter_counts
from megatron_webrl.track import evaluations
from megatron_webrl.track.evaluations import EvaluationResult
from megatron_webrl.track.run_lock import LaunchLost, start_launch
from tests.job_control import connect
from tests.launch.slurm.slurm_jobs import ROOT, SCRIPTS
from tests.launch.whole_jobs import make_run
from tests.tiny_settings import SETTINGS
from tests.waiting import until

FOUR = str(ROOT / "configs" / "8b_4node.yaml")
TASKS = len(SETTINGS["tasks"]["environments"])


@pytest.fixture
def model_8b(tmp_path: Path) -> Path:
    """A Hugging Face folder as far as a placement reads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(parameter_counts.config_sections("8B")))
    return folder


@pytest.fixture
def prepared(tmp_path: Path, checkpoint: Path) -> Config:
    """An evaluation of a run's checkpoint on two nodes, as `prepare-eval` leaves it."""
    run = make_run(tmp_path / "trained", checkpoint, run={"name": "trained", "directory": str(tmp_path)})
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = f"cluster.base_port={probe.getsockname()[1]}"
    version = str(run / "checkpoints" / checkpoint.name)
    command = ["node", "prepare-eval", version, port, "--episodes", "2", "--nodes", "2"]
    assert main([*command, "--json", str(tmp_path / "result.json")]) == 0
    return parse_config(tmp_path / "trained-evaluation-version-000007" / "config.yaml")


def model_folder(config: Config) -> Path:
    return config.run_folder / EvaluationJob.load(config.run_folder).model_folder


# -- what runs where ----------------------------------------------------------------------------------


def evaluation(model: Path, nodes: int, *arguments: str) -> Config:
    return parse_evaluation_config(EvaluatedCheckpoint.resolve(model), arguments, nodes)


def test_engines_use_every_gpu_of_every_node_whatever_the_training_job_had(model_8b: Path, tmp_path: Path) -> None:
    resolved = tmp_path / "config.yaml"  # of the run, which names the training job's numbers
    content = yaml.safe_load(Path(FOUR).read_text())
    content["rollout"] |= {"engines": 16}
    content["trainer"] |= {"data_parallel": 8}
    resolved.write_text(yaml.safe_dump(content))
    for path, nodes in ((FOUR, 4), (str(resolved), 1), (str(resolved), 2)):
        config = evaluation(model_8b, nodes, path)
        assert (config.cluster.nodes, config.rollout.engines, config.trainer_world_size) == (nodes, 8 * nodes, 0)
        placement = plan_processes(config)
        assert placement.rings == ()
        for node in range(nodes):
            here = placement.on_node(node)
            assert [process.name for process in here] == [f"rollout-{8 * node + gpu}" for gpu in range(8)]
            assert [process.devices for process in here] == [(gpu,) for gpu in range(8)]
            assert sorted(core for process in here for core in process.cores) == list(range(112))
            assert process_specs(config, placement, node, ["trainer"], "n1:29500", {}, "") == []
            specs = process_specs(config, placement, node, ["rollout"], "n1:29500", {}, "")
            assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == [str(gpu) for gpu in range(8)]


def test_nodes_without_gpus_have_an_engine_each(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"rollout": {"engines": 2, "max_model_len": 1024}, "cluster": {"nodes": 2}}))
    placed = plan_processes(evaluation(tiny_model, 3, str(path))).processes
    assert [(process.name, process.node) for process in placed] == [(f"rollout-{n}", n) for n in range(3)]
    assert evaluation(tiny_model, 2, str(path), "rollout.engines=4").rollout.engines == 4
    assert evaluation(tiny_model, 2, str(path), "rollout.pipeline_parallel=2").rollout.engines == 1
    assert evaluation(tiny_model, 1, str(path)).rollout.engines == 2  # on one machine, those of the configuration
    path.write_text("trainer: {warm_start: {demonstrations: 5, demonstrations_file: gone.records}}\n")
    assert evaluation(tiny_model, 1, str(path)).trainer.warm_start.demonstrations_file == ""


def test_a_dry_run_shows_every_process_of_an_evaluation(model_8b: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "eval.sh"), str(model_8b), FOUR, f"run.directory={tmp_path}"],
        env={**environment, "DRY_RUN": "1", "PYTHON": sys.executable, "SLURM_JOB_NUM_NODES": "2"},
        capture_output=True, text=True, timeout=120, check=True, cwd=ROOT,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("node ")]
    settings = tmp_path / "8b_4node-evaluation-model" / "config.yaml"
    starts = [f"node {n // 8} rollout-{n}: CUDA_VISIBLE_DEVICES={n % 8} " for n in range(16)] + ["node 0 evaluation: "]
    assert all(line.startswith(begin) for line, begin in zip(lines, starts, strict=True))
    assert lines[16].endswith(f" node control {settings} --host FIRST_NODE")
    assert not settings.parent.exists()


def test_evaluations_of_one_configuration_share_no_folder_and_a_requeued_one_finds_its_own(
    prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = tmp_path / "trained"
    other = trained / "checkpoints" / "version-000009"
    shutil.copytree(other.with_name("version-000007"), other)

    def prepare_job(version: int, job: str, restart: int = 0) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        assert main(["node", "prepare-eval", str(other.with_name(f"version-{version:06d}")), "--nodes", "2"]) == 0

    for version, job in ((7, "11"), (9, "12"), (7, "13")):
        prepare_job(version, job)
    prepare_job(7, "11", restart=1)
    names = {path.name for path in tmp_path.glob("trained-evaluation-*-1*")}
    kept = "trained-evaluation-version-000007-11"
    assert names == {kept, f"{kept}.1", "trained-evaluation-version-000009-12", "trained-evaluation-version-000007-13"}
    for name in names:
        checkpoint = EvaluationJob.load(tmp_path / name).checkpoint.path
        assert checkpoint.name in name
        assert parse_config(tmp_path / name / "config.yaml").model.path == str(checkpoint / "hf")
    assert [launch.restart_count for launch in read_launches(tmp_path / kept)] == [0, 1]


# -- the first node -----------------------------------------------------------------------------------


class Host:
    """`webrl node control`, and threads in the place of the workers of both nodes."""

    def __init__(self, config: Config) -> None:
        self.config, self.output = config, config.run_folder / "out.log"
        command = [sys.executable, "-m", "megatron_webrl", "node", "control", str(config.run_folder / "config.yaml")]
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1"], stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )
        path = control_address_path(config)
        wait_for_control_address(path, 90, lambda: self.process.poll() and self.output.read_text())
        self.address, self.control = path, connect(path, "test")

    def wait(self) -> int:
        """Its exit code once the job has ended; the control service does not wait for roles to read that."""
        until(self.control.job_end, self.output.read_text, 120)
        self.control.shutdown()
        return self.process.wait(60)

    def serve(self, worker: str, instances: int = 1) -> None:
        """Run episodes as a worker does. With two instances the first is lost with its first episode."""
        control = connect(self.address, worker)
        for instance in range(1, instances + 1):
            assert control.register_instance() == instance
            with suppress(JobFailed):
                while control.job_end() is None:
                    request = evaluations.current_request(control)
                    name = f"{worker}.{instance}"
                    claimed = request and control.claim(evaluations.queue_name(request), name, 1)
                    if request is None or not claimed:
                        time.sleep(POLL_SECONDS)
                        continue
                    if instance < instances:
                        break
                    [[episode, *_]] = claimed
                    evaluations.submit_result(control, request, self.result(episode, worker), episode)

    def result(self, episode: int, worker: str) -> EvaluationResult:
        environment = self.config.tasks.environments[episode % TASKS]
        return EvaluationResult(
            episode, 0, f"task-{episode}", "miniwob", environment, "easy", "success" if episode % 2 else "failure",
            steps=1, response_tokens=3, seconds=0.5, versions=(7, 7), worker=f"{worker}.1",
        )  # fmt: skip


@pytest.fixture
def host(prepared: Config) -> Iterator[Host]:
    model_folder(prepared).mkdir()
    made = Host(prepared)
    yield made
    child_process.terminate_tree(made.process, 30.0)


def test_the_first_node_collects_the_episodes_of_all_workers(host: Host, tmp_path: Path) -> None:
    workers = [
        threading.Thread(target=host.serve, args=arguments, daemon=True)
        for arguments in (("rollout-0", 1), ("rollout-1", 2))  # the second loses an episode
    ]
    for thread in workers:
        thread.start()
    assert host.wait() == 0, host.output.read_text()
    said = host.output.read_text()
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert found["checkpoint"] == str(tmp_path / "trained" / "checkpoints" / "version-000007")
    assert [each["index"] for each in found["episodes"]] == list(range(2 * TASKS))
    assert (found["evaluation"]["success_of_judged"], found["evaluation"]["missing"]) == (0.5, 0)
    assert f"job: checkpoint: {2 * TASKS} of {2 * TASKS} episodes, success 50.0% of {2 * TASKS}" in said
    assert f"job: results: {tmp_path / 'result.json'}" in said
    assert "click-test" in said
    assert (host.config.run_folder / "evaluations.jsonl").is_file()
    assert not model_folder(host.config).exists()
    assert json.loads((host.config.run_folder / "summary.json").read_text())["outcome"] == "finished"


def test_an_evaluation_that_is_stopped_stores_no_result_and_its_folder_is_refused_until_then(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, again = host.config.run_folder, ["node", "prepare-eval", str(tmp_path / "trained"), "--nodes", "2"]
    settings = (folder / "config.yaml").read_text()
    assert main(again) == 2
    assert f"run.name={folder.name}: a job runs in {folder}, its control service at " in capsys.readouterr().err
    assert model_folder(host.config).is_dir()
    assert (folder / "config.yaml").read_text() == settings
    until(lambda: evaluations.current_request(host.control) is not None, host.output.read_text)
    assert main(["node", "stop", str(folder / "config.yaml")]) == 0
    assert host.wait() == 1, host.output.read_text()
    assert "job: stopped\n" in host.output.read_text()
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "stopped"
    assert not (tmp_path / "result.json").exists()
    assert not model_folder(host.config).exists()
    assert main(again) == 0
    assert (folder.with_name(f"{folder.name}.1") / "summary.json").is_file()


def test_a_lost_first_node_leaves_the_weights_of_its_successor(host: Host, tmp_path: Path) -> None:
    lost, checkpoint = model_folder(host.config), tmp_path / "trained" / "checkpoints" / "version-000007"
    address = host.address.read_bytes()
    host.address.unlink()  # as if the lost node's service could not be reached
    assert main(["node", "prepare-eval", str(checkpoint), "--nodes", "2"]) == 0
    assert not lost.exists()
    successor = model_folder(host.config)  # of the same run folder
    successor.mkdir()
    host.address.write_bytes(address)
    host.process.send_signal(signal.SIGTERM)
    assert host.wait() == 1
    assert successor.is_dir()


def test_a_conversion_that_ends_after_a_takeover_does_not_name_the_model(prepared: Config) -> None:
    with start_launch(prepared.run_folder, {}) as lost:
        pass
    with start_launch(prepared.run_folder, {}):
        pass
    settings = prepared.run_folder / "config.yaml"
    before = settings.read_text()
    with pytest.raises(LaunchLost, match=f"another launch has taken over {prepared.run_folder}"):
        convert_checkpoint(prepared, lost)
    assert settings.read_text() == before


def test_a_checkpoint_is_converted_into_the_folder_that_all_nodes_read_and_a_damaged_one_ends_the_job(
    prepared: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, version = prepared.run_folder / "config.yaml", tmp_path / "trained" / "checkpoints" / "version-000007"
    with pytest.raises(ConfigError, match=r"evaluation.only=true runs no trainer; evaluate with `webrl eval`"):
        load_config(settings)
    before = settings.read_text()
    assert prepared.model.path == str(version / "hf")
    assert main(["node", "convert", str(settings)]) == 0
    assert parse_config(settings).model.path == str(model_folder(prepared))
    assert {"config.json", "model.safetensors"} <= {path.name for path in model_folder(prepared).iterdir()}
    shutil.rmtree(model_folder(prepared))
    settings.write_text(before)
    [file, *_] = (version / "megatron").glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    capsys.readouterr()
    assert main(["node", "convert", str(settings)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    outcome = json.loads((prepared.run_folder / "summary.json").read_text())["outcome"]
    assert said == f"webrl: {outcome.removeprefix('failed: ')}\n"
    assert not model_folder(prepared).exists()
