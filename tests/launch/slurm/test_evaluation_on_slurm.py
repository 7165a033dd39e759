"""launch/slurm/eval.sh on a real Slurm of two virtual nodes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_webrl.launch.evaluation import MODEL_PREFIX
from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.track import evaluations, events
from tests.job_control import connect
from tests.launch.slurm.slurm_jobs import ROOT, log, overrides, rings, submit
from tests.launch.slurm.virtual_slurm import Cluster, virtual_slurm, why_not
from tests.tiny_settings import SETTINGS
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

WAITING = f"{sys.executable} -I -S {Path(__file__).with_name('slurm_waiting.py')}"


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with virtual_slurm(2) as cluster:
        yield cluster


@pytest.fixture
def trained(tmp_path: Path, tiny_model: Path) -> Path:
    """The folder of a run on one node, with a checkpoint."""
    folder = tmp_path / f"trained{os.getpid()}"
    version = folder / "checkpoints" / "version-000007"
    version.parent.mkdir(parents=True)
    hf_to_megatron(tiny_model, version, ParallelSizes(), ConversionOptions())
    (version / "state.json").write_text('{"version": 7}')
    (version.parent / "latest").write_text(version.name)
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "model": {"path": "gone"}}))
    return folder


def evaluate(cluster: Cluster, run: Path, *arguments: str, **environment: str) -> str:
    """Submit an evaluation of a run on both nodes; returns the number of the job."""
    return submit(
        cluster, run.parent, "eval.sh", str(run), *overrides(run.parent, run.name), *arguments,
        options=("--nodes=2",), PREFLIGHT="0", MLFLOW_TRACKING_URI="", **environment,
    )  # fmt: skip


def folder_of(trained: Path, job: str) -> Path:
    return trained.with_name(f"{trained.name}-evaluation-version-000007-{job}")


def processes(folder: Path) -> list[psutil.Process]:
    """What runs with this folder in its command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


def has_result_of(worker: str, folder: Path) -> bool:
    """Whether an instance of a worker has finished an episode of the running evaluation."""
    if not (folder / "control.json").is_file():
        return False
    control = connect(folder / "control.json", "test")
    request = evaluations.current_request(control)
    if request is None:  # with screenshots, then blank images
        return False
    with suppress(ValueError):  # withdrawn since
        values = control.run("read_queue", evaluations.queue_name(request))["values"]
        return any(result["worker"] == worker for _, result in values)
    return False


def outcome(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["outcome"]


@pytest.mark.timeout(1800)
def test_a_checkpoint_is_evaluated_on_two_nodes_although_a_worker_is_killed(two: Cluster, trained: Path) -> None:
    """Only real engines and browsers show that both nodes act with the converted weights."""
    result = trained.parent / "result.json"
    job = evaluate(two, trained, "evaluation.blank_images=true", "--episodes", "30", "--json", str(result))
    folder = folder_of(trained, job)
    until(lambda: any(folder.glob(f"{MODEL_PREFIX}*/config.json")), lambda: f"weights: {log(trained.parent)}", 300)
    until(lambda: has_result_of("rollout-1.1", folder), lambda: f"an episode of node 1: {log(trained.parent)}", 900)
    (worker,) = [process for process in processes(folder) if process.cmdline()[-1] == "rollout-1"]
    worker.kill()
    assert two.wait(job, 600) == "COMPLETED", log(trained.parent)
    found, said = json.loads(result.read_text()), log(trained.parent)
    assert found["checkpoint"] == str(trained / "checkpoints" / "version-000007")
    for name in ("evaluation", "blank_images"):
        assert (found[name]["versions"], found[name]["missing"]) == ([7, 7], 0)
    assert sorted(each["index"] for each in found["episodes"]) == list(range(60))  # of two environments
    assert "node 1 (" in said
    assert "restarting rollout-1 (restart 1 of 6 within an hour)" in said
    assert f"job: results: {result}" in said
    workers = {json.loads(line)["worker"] for path in (folder / "evaluations").iterdir() for line in path.open()}
    assert {"rollout-0.1", "rollout-1.1"} <= workers
    assert [event.role for event in events.read_events(folder) if event.event == events.RESTARTED] == ["rollout-1"]
    assert outcome(folder) == "finished"
    assert not any(folder.glob(f"{MODEL_PREFIX}*"))
    assert not rings(trained.name)
    until(lambda: not processes(folder), lambda: f"{processes(folder)} to end", 30)


@pytest.mark.soak
def test_a_worker_that_does_not_start_ends_the_evaluation_with_its_name(two: Cluster, trained: Path) -> None:
    job = evaluate(two, trained, "rollout.min_engines=2", STUB_COMMAND=f"{WAITING} --fail-rollout-1")
    folder = folder_of(trained, job)
    assert two.wait(job, 200) == "FAILED", log(trained.parent)
    assert outcome(folder).startswith("failed: rollout-1 exited with code 1; last log line: it fails on purpose")
    assert f"job: {outcome(folder)}" in log(trained.parent)
    assert not any(folder.glob(f"{MODEL_PREFIX}*"))
    until(lambda: not processes(folder), lambda: f"{processes(folder)} to end", 60)


def test_a_cancelled_evaluation_leaves_no_process_and_no_weights(two: Cluster, trained: Path) -> None:
    job = evaluate(two, trained, STUB_COMMAND=WAITING)
    folder = folder_of(trained, job)
    until(lambda: log(trained.parent).count("started rollout-") == 2, lambda: f"workers: {log(trained.parent)}", 200)
    assert any(folder.glob(f"{MODEL_PREFIX}*/config.json"))
    two.run("scancel", job)
    assert two.wait(job, 60) == "CANCELLED", log(trained.parent)
    until(lambda: not processes(folder), lambda: f"{processes(folder)} to end", 60)
    assert outcome(folder) == "interrupted by SIGTERM"
    assert not any(folder.glob(f"{MODEL_PREFIX}*"))
