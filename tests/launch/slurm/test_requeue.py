"""How jobs end early on a real Slurm of virtual nodes, and what starts again; evaluations on two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_webrl.checks.report import failed, write_json
from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.evaluation import MODEL_PREFIX
from megatron_webrl.launch.run_folder import config_path, report_folder
from megatron_webrl.launch.signals import is_notice
from megatron_webrl.launch.slurm import prepare
from megatron_webrl.launch.slurm.commands import TOO_FEW_NODES_EXIT_CODE
from megatron_webrl.launch.slurm.prepare import resume_overrides
from megatron_webrl.track import evaluations, events
from megatron_webrl.util import atomic_file
from tests.job_control import connect
from tests.launch.slurm.slurm_jobs import PAYLOAD, ROOT, log, overrides, rings, submit
from tests.launch.slurm.virtual_slurm import Cluster, virtual_slurm, why_not
from tests.launch.whole_jobs import make_run
from tests.waiting import until

on_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def five() -> Iterator[Cluster]:
    with virtual_slurm(5) as cluster:
        yield cluster


def processes(folder: Path) -> list[psutil.Process]:
    """The processes with this folder in their command lines."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


def outcome(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["outcome"]


class Waiting:
    """A job on one node that makes no update until it is ended."""

    def __init__(self, cluster: Cluster, folder: Path, kind: str = "", *settings: str, **environment: str) -> None:
        folder.mkdir()
        self.cluster, self.folder, self.name = cluster, folder, f"{folder.name}{os.getpid()}"
        self.run_folder = folder / self.name
        self.job = submit(
            cluster, folder, "train_cpu.sh", *overrides(folder, self.name), *settings, options=("--nodes=1",),
            STUB_COMMAND=f"{PAYLOAD} {kind}", PREFLIGHT="0", **environment,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return log(self.folder)

    @property
    def outcome(self) -> str:
        return outcome(self.run_folder)

    def until_it_runs(self) -> None:
        until(lambda: self.log.count("started ") >= 2, lambda: f"both steps to start: {self.log}", 90)

    def signal(self) -> None:
        self.cluster.run("scancel", "--batch", "--signal=USR1", self.job)

    def process(self, *words: str) -> psutil.Process:
        """The Python process of this job with these words in its command line."""
        found = [(process.cmdline(), process) for process in processes(self.run_folder)]
        return next(process for line, process in found if "python" in line[0] and {*words} < {*line})

    def restarts(self) -> int:
        return int(self.cluster.show(self.job)["Restarts"])


@on_slurm
@pytest.mark.slow
def test_a_signalled_job_saves_and_resumes_and_a_stopped_one_does_not(five: Cluster, tmp_path: Path) -> None:
    signalled = Waiting(five, tmp_path / "signalled")
    late = Waiting(five, tmp_path / "late", "--ignore-stop", GRACE_SECONDS="3")
    stopped = Waiting(five, tmp_path / "stopped")
    cancelled = Waiting(five, tmp_path / "cancelled")
    without_checkpoint = Waiting(five, tmp_path / "without_checkpoint", "--no-checkpoint", "run.max_trainer_restarts=1")
    for job in (signalled, late, stopped, cancelled):
        job.until_it_runs()
    signalled.signal()
    late.signal()
    stop = [sys.executable, "-m", "megatron_webrl", "node", "stop", str(stopped.run_folder / "config.yaml")]
    subprocess.run(stop, check=True, timeout=60)
    five.run("scancel", cancelled.job)

    def check_requeued(job: Waiting, *messages: str) -> None:
        assert five.wait(job.job, 120) == "COMPLETED", job.log
        assert (job.restarts(), job.outcome) == (1, "finished")
        for message in messages:
            assert message in job.log, job.log

    check_requeued(
        signalled,
        "job: SIGUSR1: the job will end; 7200 s left for a checkpoint",
        "job: stop requested (preempted): the job ends after the current update, with a checkpoint",
        f"job: launch 2 of job {signalled.job}, resuming from version-000001; the previous launch ended: preempted",
    )
    assert parse_config(signalled.run_folder / "config.yaml").run.resume
    check_requeued(
        late,
        "job: no checkpoint in time after SIGUSR1: resuming from the last one; requeueing the job",
        "the previous launch ended: failed: no checkpoint in time after SIGUSR1",
        f"launch 2 of job {late.job}, starting over, no checkpoint is complete",
        f"renamed the earlier run of this name to {late.run_folder}.1",
    )
    assert [start.restart_count for start in prepare.read_launches(late.run_folder)] == [0, 1]
    assert five.wait(stopped.job, 60) == "COMPLETED", stopped.log
    assert (stopped.restarts(), stopped.outcome) == (0, "stopped")
    assert five.wait(cancelled.job, 60) == "CANCELLED", cancelled.log
    assert cancelled.restarts() == 0
    assert five.wait(without_checkpoint.job, 120) == "FAILED", without_checkpoint.log
    assert without_checkpoint.restarts() == 2
    message = f"job {without_checkpoint.job} was launched 2 times from no checkpoint and made no newer one"
    assert without_checkpoint.outcome.startswith(f"failed: {message}")
    assert message in without_checkpoint.log


@on_slurm
@pytest.mark.slow
def test_a_job_that_lost_its_host_or_a_supervisor_is_requeued_and_one_that_failed_is_not(
    five: Cluster, tmp_path: Path
) -> None:
    limit = {"STEP_EXIT_SECONDS": "3"}
    host, supervisor = (Waiting(five, tmp_path / name, **limit) for name in ("host", "supervisor"))
    failed = Waiting(five, tmp_path / "failed", "--fail-trainer-0", "run.max_trainer_restarts=0", **limit)
    for job in (host, supervisor):
        job.until_it_runs()
    host.process("node", "control").kill()
    supervisor.process("node", "rollout").kill()
    for job, reason in (
        (host, "without a summary: it was killed, or a node was lost"),
        (supervisor, "failed: infrastructure: the rollout step ended with code 137"),
    ):
        assert five.wait(job.job, 180) == "COMPLETED", job.log
        assert (job.restarts(), job.outcome) == (1, "finished")
        assert f"the previous launch ended: {reason}" in job.log, job.log
    assert host.log.count("job: the infrastructure failed; requeueing the job") == 1
    assert five.wait(failed.job, 120) == "FAILED", failed.log
    assert failed.restarts() == 0
    assert failed.outcome.startswith("failed: trainer-0 exited with code 1; last log line: it fails on purpose")


@pytest.fixture
def trained(tmp_path: Path, checkpoint: Path) -> Path:
    """The folder of a run on one node, with a checkpoint."""
    return make_run(tmp_path / f"trained{os.getpid()}", checkpoint, model={"path": "gone"})


def evaluate(cluster: Cluster, run: Path, *arguments: str, **environment: str) -> str:
    """Submit an evaluation of a run on both nodes; returns the number of the job."""
    return submit(
        cluster, run.parent, "eval.sh", str(run), *overrides(run.parent, run.name), *arguments,
        options=("--nodes=2",), PREFLIGHT="0", MLFLOW_TRACKING_URI="", **environment,
    )  # fmt: skip


def folder_of(trained: Path, job: str) -> Path:
    return trained.with_name(f"{trained.name}-evaluation-version-000007-{job}")


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


@on_slurm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_is_evaluated_on_two_nodes_although_a_worker_is_killed(five: Cluster, trained: Path) -> None:
    """Only real engines and browsers show that both nodes act with the converted weights."""
    result = trained.parent / "result.json"
    job = evaluate(five, trained, "evaluation.blank_images=true", "--episodes", "30", "--json", str(result))
    folder = folder_of(trained, job)
    until(lambda: any(folder.glob(f"{MODEL_PREFIX}*/config.json")), lambda: f"weights: {log(trained.parent)}", 300)
    until(lambda: has_result_of("rollout-1.1", folder), lambda: f"an episode of node 1: {log(trained.parent)}", 900)
    (worker,) = [process for process in processes(folder) if process.cmdline()[-1] == "rollout-1"]
    worker.kill()
    assert five.wait(job, 600) == "COMPLETED", log(trained.parent)
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


def test_too_few_good_nodes_have_an_exit_code_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", "cluster.nodes=2"])
    folder = report_folder(config)
    folder.mkdir(parents=True)
    save_config(config, config_path(config))
    write_json(folder / "n1.json", [])
    write_json(folder / "n2.json", [failed("n2", "browser", "it shows no page")])
    choose = ["node", "choose", str(config_path(config))]
    assert main([*choose, "n1", "n2"]) == TOO_FEW_NODES_EXIT_CODE  # launch/slurm/common.sh holds such a job
    assert "1 of 2 nodes passed the check" in capsys.readouterr().err
    assert main([*choose, "n1"]) == 2  # no other node would help
    write_json(folder / "n3.json", [])
    assert main([*choose, "n1", "n2", "n3"]) == 0
    assert capsys.readouterr().out == "n1 n3\n"


def test_launches_are_counted_by_job_and_checkpoint(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", "run.max_trainer_restarts=1"])
    latest = config.run_folder / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)

    def start(job: str, restart: int) -> str:
        begun = prepare.record_launch(config, {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)})
        prepare.write_launches(config.run_folder, begun)
        return begun[-1].message

    assert (is_notice(signal.SIGUSR1, {}), is_notice(signal.SIGTERM, {})) == (True, False)  # no job of Slurm
    assert not is_notice(signal.SIGINT, {"SLURM_JOB_ID": "1"})
    assert prepare.record_launch(config, {}) == []
    assert start("7", 0) == ""
    assert "launch 2 of job 7, starting over" in start("7", 1)
    latest.write_text("version-000004\n")
    assert prepare.UNKNOWN_OUTCOME in start("7", 2)
    assert "launch 4 of job 7, resuming from version-000004" in start("7", 3)
    assert start("8", 0) == ""  # another job may try as often again
    with pytest.raises(
        ConfigError, match=r"job 7 was launched 2 times from version-000004 .*run.max_trainer_restarts=1"
    ):
        start("7", 4)
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"].startswith("failed: job 7 was")


def test_a_job_requeued_before_it_had_a_folder_leaves_an_earlier_run_alone(tmp_path: Path) -> None:
    empty, name = tmp_path / "empty.yaml", [f"run.directory={tmp_path}", "run.name=here"]
    empty.write_text("{}\n")
    (tmp_path / "here" / "checkpoints").mkdir(parents=True)
    (tmp_path / "here" / "checkpoints" / "latest").write_text("version-000100\n")
    atomic_file.write_json(tmp_path / "here" / "summary.json", {"outcome": "finished"})
    prepare.write_launches(tmp_path / "here", [prepare.JobLaunch("7", 0, None, None, 1.0)])
    other = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}
    assert resume_overrides(str(empty), name, other) == []
    launch = prepare.record_launch(parse_config(empty, name), other)[-1]
    assert (launch.checkpoint, launch.previous_outcome) == (None, prepare.UNKNOWN_OUTCOME)
