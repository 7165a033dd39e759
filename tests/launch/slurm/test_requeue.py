"""How jobs end early on a real Slurm of virtual nodes, and what starts again: by signal, by time, by the user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_webrl.checks.report import failed, write_json
from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.run_folder import config_path, report_folder
from megatron_webrl.launch.signals import is_notice
from megatron_webrl.launch.slurm import prepare
from megatron_webrl.launch.slurm.commands import TOO_FEW_NODES_EXIT_CODE
from megatron_webrl.launch.slurm.prepare import resume_overrides
from megatron_webrl.util import atomic_file
from tests.launch.slurm.slurm_jobs import ROOT, log, overrides, submit
from tests.launch.slurm.virtual_slurm import Cluster, virtual_slurm, why_not
from tests.waiting import until

on_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
WAITING = f"{sys.executable} -I -S {Path(__file__).with_name('slurm_waiting.py')}"


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def five() -> Iterator[Cluster]:
    with virtual_slurm(5) as cluster:
        yield cluster


class Waiting:
    """A job on one node that makes no update until it is ended."""

    def __init__(self, cluster: Cluster, folder: Path, kind: str = "", *settings: str, **environment: str) -> None:
        folder.mkdir()
        self.cluster, self.folder, self.name = cluster, folder, f"{folder.name}{os.getpid()}"
        self.run_folder = folder / self.name
        self.job = submit(
            cluster, folder, "train_cpu.sh", *overrides(folder, self.name), *settings, options=("--nodes=1",),
            STUB_COMMAND=f"{WAITING} {kind}", PREFLIGHT="0", **environment,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return log(self.folder)

    @property
    def outcome(self) -> str:
        return json.loads((self.run_folder / "summary.json").read_text())["outcome"]

    def until_it_runs(self) -> None:
        until(lambda: self.log.count("started ") >= 2, lambda: f"both steps to start: {self.log}", 90)

    def signal(self) -> None:
        self.cluster.run("scancel", "--batch", "--signal=USR1", self.job)

    def process(self, *words: str) -> psutil.Process:
        """The Python process of this job with all of these words in its command line."""
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if (
                str(self.run_folder) in " ".join(line)
                and "python" in line[0]
                and all(any(word in part for part in line) for word in words)
            ):
                return process
        raise AssertionError(f"{self.name} has no process {words}: {self.log}")

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

    assert five.wait(signalled.job, 120) == "COMPLETED", signalled.log
    assert (signalled.restarts(), signalled.outcome) == (1, "finished")
    assert "job: SIGUSR1: the job will end; 7200 s left for a checkpoint" in signalled.log
    assert "job: stop requested (preempted): the job ends after the current update, with a checkpoint" in signalled.log
    assert "job: state:      preempted; " in signalled.log
    message = (
        f"job: launch 2 of job {signalled.job}, resuming from version-000001; the previous launch ended: preempted"
    )
    assert message in signalled.log
    assert parse_config(signalled.run_folder / "config.yaml").run.resume

    assert five.wait(late.job, 120) == "COMPLETED", late.log
    assert (late.restarts(), late.outcome) == (1, "finished")
    assert "job: no checkpoint in time after SIGUSR1: resuming from the last one; requeueing the job" in late.log
    assert "the previous launch ended: failed: no checkpoint in time after SIGUSR1" in late.log
    assert f"launch 2 of job {late.job}, starting over, no checkpoint is complete" in late.log
    assert f"renamed the earlier run of this name to {late.run_folder}.1" in late.log
    assert [start.restart_count for start in prepare.read_launches(late.run_folder)] == [0, 1]

    assert five.wait(stopped.job, 60) == "COMPLETED", stopped.log
    assert (stopped.restarts(), stopped.outcome) == (0, "stopped")

    assert five.wait(cancelled.job, 60) == "CANCELLED", cancelled.log
    assert cancelled.restarts() == 0

    assert five.wait(without_checkpoint.job, 120) == "FAILED", without_checkpoint.log
    assert without_checkpoint.restarts() == 2
    message = f"failed: job {without_checkpoint.job} was launched 2 times from no checkpoint and made no newer one "
    message += "(run.max_trainer_restarts=1)"
    assert without_checkpoint.outcome.startswith(message)
    assert message.removeprefix("failed: ") in without_checkpoint.log


@on_slurm
@pytest.mark.slow
def test_a_job_that_lost_its_host_or_a_supervisor_is_requeued_and_one_that_failed_is_not(
    five: Cluster, tmp_path: Path
) -> None:
    host = Waiting(five, tmp_path / "host", STEP_EXIT_SECONDS="3")
    supervisor = Waiting(five, tmp_path / "supervisor", STEP_EXIT_SECONDS="3")
    failed = Waiting(five, tmp_path / "failed", "--fail-trainer-0", "run.max_trainer_restarts=0", STEP_EXIT_SECONDS="3")
    for job in (host, supervisor):
        job.until_it_runs()
    host.process("node", "control").kill()
    supervisor.process("node", "rollout").kill()

    assert five.wait(host.job, 180) == "COMPLETED", host.log
    assert (host.restarts(), host.outcome) == (1, "finished")
    assert host.log.count("job: the infrastructure failed; requeueing the job") == 1
    assert "the previous launch ended: without a summary: it was killed, or a node was lost" in host.log, host.log

    assert five.wait(supervisor.job, 180) == "COMPLETED", supervisor.log
    assert (supervisor.restarts(), supervisor.outcome) == (1, "finished")
    assert "the previous launch ended: failed: infrastructure: the rollout step ended with code 137" in supervisor.log

    assert five.wait(failed.job, 120) == "FAILED", failed.log
    assert failed.restarts() == 0
    assert failed.outcome.startswith("failed: trainer-0 exited with code 1; last log line: it fails on purpose")


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


def test_only_an_announced_end_is_a_notice() -> None:
    assert is_notice(signal.SIGUSR1, {})
    assert not is_notice(signal.SIGTERM, {})  # no job of Slurm
    assert not is_notice(signal.SIGINT, {"SLURM_JOB_ID": "1"})


def test_launches_are_counted_by_job_and_checkpoint(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=here", "run.max_trainer_restarts=1"])
    latest = config.run_folder / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)

    def start(job: str, restart: int) -> str:
        begun = prepare.record_launch(config, {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)})
        prepare.write_launches(config.run_folder, begun)
        return begun[-1].message

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
