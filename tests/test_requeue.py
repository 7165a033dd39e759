"""How jobs end early on a real Slurm of virtual nodes, and what starts again: by signal, by time, by the user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config import ConfigError, read, save
from megatron_webrl.node import findings, requeue
from megatron_webrl.node.commands import UNFIT_CODE
from megatron_webrl.node.signals import is_notice
from megatron_webrl.roles import settings_file
from tests.slurm_jobs import ROOT, log, overrides, submit
from tests.virtual_slurm import Cluster, virtual_slurm, why_not
from tests.waiting import until

pytestmark = pytest.mark.alone
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
            REHEARSE=f"{WAITING} {kind}", PREFLIGHT="0", **environment,
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

    def restarts(self) -> int:
        return int(self.cluster.show(self.job)["Restarts"])


@on_slurm
@pytest.mark.slow
def test_a_job_that_will_end_saves_and_goes_on_and_one_that_was_ended_does_not(five: Cluster, tmp_path: Path) -> None:
    signalled = Waiting(five, tmp_path / "signalled")
    late = Waiting(five, tmp_path / "late", "--deaf", GRACE_SECONDS="3")
    stopped = Waiting(five, tmp_path / "stopped")
    cancelled = Waiting(five, tmp_path / "cancelled")
    barren = Waiting(five, tmp_path / "barren", "--barren", "run.requeues=1")
    for job in (signalled, late, stopped, cancelled):
        job.until_it_runs()
    signalled.signal()
    late.signal()
    stop = [sys.executable, "-m", "megatron_webrl.cli", "node", "stop", str(stopped.run_folder / "config.yaml")]
    subprocess.run(stop, check=True, timeout=60)
    five.run("scancel", cancelled.job)

    assert five.wait(signalled.job, 120) == "COMPLETED", signalled.log
    assert (signalled.restarts(), signalled.outcome) == (1, "finished")
    assert "job: SIGUSR1: the job will end, and has 3600 s for a checkpoint" in signalled.log
    assert "job: to be preempted: it ends after the update under way, with a checkpoint" in signalled.log
    assert "job: state:      preempted; " in signalled.log
    words = f"job: start 2 of job {signalled.job}, goes on from version-000001; the start before ended: preempted"
    assert words in signalled.log
    assert read(signalled.run_folder / "config.yaml").run.resume

    assert five.wait(late.job, 120) == "COMPLETED", late.log
    assert (late.restarts(), late.outcome) == (1, "finished")
    assert "job: no checkpoint in the time after SIGUSR1: it goes on from the last one" in late.log
    assert "the start before ended: failed: no checkpoint in the time after SIGUSR1" in late.log
    assert f"start 2 of job {late.job}, begins anew, as no checkpoint is complete" in late.log
    assert f"the earlier run of this name is kept as {late.run_folder}.1" in late.log
    assert [start.restart for start in requeue.read(late.run_folder)] == [0, 1]

    assert five.wait(stopped.job, 60) == "COMPLETED", stopped.log
    assert (stopped.restarts(), stopped.outcome) == (0, "stopped")

    assert five.wait(cancelled.job, 60) == "CANCELLED", cancelled.log
    assert cancelled.restarts() == 0

    assert five.wait(barren.job, 120) == "FAILED", barren.log
    assert barren.restarts() == 2
    words = f"failed: job {barren.job} was started 2 times at no checkpoint and made no newer one (run.requeues=1)"
    assert barren.outcome.startswith(words)
    assert words.removeprefix("failed: ") in barren.log


def test_too_few_fit_nodes_are_told_by_a_code_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read(None, [f"run.directory={tmp_path}", "run.name=here", "cluster.nodes=2"])
    findings.folder(config).mkdir(parents=True)
    save(config, settings_file(config))
    findings.write(config, findings.Findings("n1"))
    findings.write(config, findings.Findings("n2", {"browser": "it shows no page"}))
    choose = ["node", "choose", str(settings_file(config))]
    assert main([*choose, "n1", "n2"]) == UNFIT_CODE  # by which launch/slurm/common.sh holds a job
    assert "1 of 2 nodes are fit" in capsys.readouterr().err
    assert main([*choose, "n1"]) == 2  # no other node would help
    findings.write(config, findings.Findings("n3"))
    assert main([*choose, "n1", "n2", "n3"]) == 0
    assert capsys.readouterr().out == "n1 n3\n"


def test_only_what_slurm_announces_is_a_notice() -> None:
    assert is_notice(signal.SIGUSR1, {})
    assert not is_notice(signal.SIGTERM, {})  # no job of Slurm
    assert not is_notice(signal.SIGINT, {"SLURM_JOB_ID": "1"})


def test_starts_are_counted_by_job_and_checkpoint(tmp_path: Path) -> None:
    config = read(None, [f"run.directory={tmp_path}", "run.name=here", "run.requeues=1"])
    latest = config.run_folder / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)

    def start(job: str, restart: int) -> str:
        begun = requeue.begin(config, {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)})
        requeue.write(config.run_folder, begun)
        return begun[-1].words

    assert requeue.begin(config, {}) == []
    assert start("7", 0) == ""
    assert "start 2 of job 7, begins anew" in start("7", 1)
    latest.write_text("version-000004\n")
    assert requeue.UNKNOWN in start("7", 2)
    assert "start 4 of job 7, goes on from version-000004" in start("7", 3)
    assert start("8", 0) == ""  # another job may try as often again
    with pytest.raises(ConfigError, match=r"job 7 was started 2 times at version-000004 .*run.requeues=1"):
        start("7", 4)
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"].startswith("failed: job 7 was")
