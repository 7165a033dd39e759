"""A training job on two of four virtual nodes continues after a fault of the cluster.

`test_node_job.py` and `tests/launch/test_job_failures.py` kill its processes, `test_requeue.py` and `test_machines.py`
preempt it, `test_stalled_disk.py` and `tests/launch/test_failing_disks.py` take its file system.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_webrl.control import child_process
from megatron_webrl.track import summary
from tests.finished_runs import run_problems
from tests.launch.slurm.slurm_jobs import ROOT, leftovers_on, log, overrides, submit
from tests.launch.slurm.virtual_slurm import END_STATES, Cluster, virtual_slurm, why_not
from tests.tiny_settings import SETTINGS
from tests.waiting import until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not(namespaces=True)), reason=why_not(namespaces=True) or "-"),
]
NODES = ("n1", "n2", "n3", "n4")
ROLES = (("n1", "trainer-0"), ("n2", "trainer-1"), ("n1", "rollout-0"), ("n2", "rollout-1"))
CUT_SECONDS, STOP_SECONDS = 60.0, 30.0
SLURMD_SECONDS = 120  # time after which Slurm sees a node that does not answer as down: longer than the cut of a link
UPDATES = 32
OPEN_TICKETS_AT_END = 4  # (max_staleness + 1) * groups_per_update of tests/tiny_settings.py
JOB_SECONDS = 900.0


@dataclass
class Job:
    """A trainer rank and an engine on each of two nodes, with a checkpoint after every update."""

    cluster: Cluster
    folder: Path
    id: str

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def version(self) -> int:
        """The version after the latest update."""
        return max((update["version"] for update in summary.read_updates(self.run)), default=0)

    def state(self) -> str:
        return self.cluster.show(self.id)["JobState"]

    def process(self, node: str, role: str) -> psutil.Process | None:
        """The process of a role; not one that it has forked."""
        found = []
        for process in self.cluster.processes(node):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                mark = process.environ().get(child_process.ROLE_VARIABLE)
                if mark == role and "-m megatron_webrl " in " ".join(process.cmdline()):
                    found.append(process)
        return min(found, key=lambda process: process.create_time(), default=None)

    def started(self) -> list[float]:
        """Start times of the roles."""
        return [process.create_time() for role in ROLES if (process := self.process(*role))]


def lose_node(job: Job) -> None:
    """All processes of a node end at once, as at a power failure."""
    job.cluster.kill_node("n2")
    until(lambda: int(job.cluster.show(job.id)["Restarts"]), lambda: f"a requeue: {log(job.folder)}", JOB_SECONDS)


def cut_link(job: Job) -> None:
    """The network card of a node is down."""
    job.cluster.cut("n2")
    try:
        time.sleep(CUT_SECONDS)
    finally:
        job.cluster.mend("n2")


def kill_control(job: Job) -> None:
    """The control service is killed three times, and then stopped."""
    killed: set[psutil.Process] = set()
    for stopped in (False, False, False, True):
        until(lambda: job.process("n1", "control") not in {None, *killed}, "a control service", 300)
        process = job.process("n1", "control")
        assert process is not None
        if not stopped:
            process.kill()
            killed.add(process)
            time.sleep(5.0)
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(STOP_SECONDS)
    finally:
        process.send_signal(signal.SIGCONT)


def fill_shared_memory(job: Job) -> None:
    """A neighbour leaves 64 KiB in a node's /dev/shm until two updates have followed."""
    status, last = os.statvfs(job.cluster.path("n2", "/dev/shm")), job.version()
    used = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
    inside = ("nsenter", f"--target={job.cluster.first_process('n2')}", "--mount", "mount", "-o")
    subprocess.run([*inside, f"remount,size={used + 64}k", "/dev/shm"], check=True)
    try:
        until(lambda: job.version() >= last + 2, "updates with a full /dev/shm", 300)
    finally:
        subprocess.run([*inside, "remount,size=50%", "/dev/shm"], check=True)


@pytest.mark.parametrize("fault", [lose_node, cut_link, kill_control, fill_shared_memory])
def test_a_job_goes_on_after_a_fault_of_the_cluster(fault: Callable[[Job], None], tmp_path: Path) -> None:
    settings = {**SETTINGS, "model": {"path": str(ROOT / "models" / "quickstart")}}
    settings["trainer"] = {**SETTINGS["trainer"], "updates": UPDATES, "checkpoint": {"every": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    lost = fault is lose_node
    with virtual_slurm(4, namespaces=True, shared=[tmp_path], slurmd_seconds=SLURMD_SECONDS) as cluster:
        number = submit(
            cluster, tmp_path, "train_cpu.sh", *overrides(tmp_path, "run"), CONFIG=str(tmp_path / "config.yaml"),
            PREFLIGHT="0", MLFLOW_TRACKING_URI="",
            options=("--nodes=2", "--nodelist=n1,n2") if not lost else ("--nodes=2", "--requeue"),
        )  # fmt: skip
        job = Job(cluster, tmp_path, number)
        until(lambda: job.version() >= 2, lambda: f"two updates: {log(tmp_path)}", JOB_SECONDS)
        started = job.started()
        fault(job)
        last = job.version()
        until(lambda: job.version() > last, lambda: f"an update after the fault: {log(tmp_path)}", JOB_SECONDS)
        assert lost or job.started() == started
        until(lambda: job.state() in END_STATES, lambda: f"the end: {log(tmp_path)}", JOB_SECONDS)
        assert job.state() == "COMPLETED", log(tmp_path)
        assert int(cluster.show(number)["Restarts"]) == lost
        nodes = [node for node in NODES if not lost or node != "n2"]
        until(lambda: not any(leftovers_on(cluster, node) for node in nodes), "all processes and files to go", 30)
    assert run_problems(job.run, UPDATES, OPEN_TICKETS_AT_END) == []
    assert fault is not kill_control or re.search(r"starting it again \(restart 3 of 30 an hour\)", log(tmp_path))
