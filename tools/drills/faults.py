"""The faults, and the expected behaviour after each."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from tools.drills.run import FIRST_NODE, SECOND_NODE, DrillError, DrillJob

CUT_SECONDS = 60.0
STOP_SECONDS = 30.0
FREEZE_SECONDS = 65.0
ROOM_KIB = 64  # that a neighbour leaves in /dev/shm
FAILED_CHECKPOINTS = 2  # checkpoints that fail before the disk has space again
FAULT_SECONDS = 300.0


@dataclass(frozen=True)
class Drill:
    """One fault of a running job, and the checks after it."""

    name: str
    fault: str  # description
    inject: Callable[[DrillJob], None]  # returns when the fault has ended or is permanent
    requeued: bool = False  # Slurm must requeue the job
    must_survive: tuple[tuple[str, str], ...] = ()  # (node, role) of processes that must not restart
    log_pattern: str = ""  # regular expression that the job's log must match
    on_disk: Literal["nothing", "checkpoints", "run"] = "nothing"  # what is on a small disk of its own
    lost_node: str = ""  # a node that does not return
    updates_after: int = 4  # least number of updates after the fault


def _kill(process: psutil.Process | None, name: str) -> None:
    if process is None:
        raise DrillError(f"there is no {name} to kill")
    process.send_signal(signal.SIGKILL)


def kill_engine(run: DrillJob) -> None:
    """Kill the vLLM process of a worker."""
    found = [process for process in run.cluster.processes(SECOND_NODE) if "EngineCore" in _command_line(process)]
    _kill(next(iter(found), None), f"engine on {SECOND_NODE}")


def kill_browsers(run: DrillJob) -> None:
    """Kill all Chromium processes of a node, and the browser server."""
    found = [
        process
        for process in run.cluster.processes(SECOND_NODE)
        if "chrom" in _command_line(process).split(" ")[0] or "megatron_webrl browsers serve" in _command_line(process)
    ]
    if not found:
        raise DrillError(f"there are no browsers on {SECOND_NODE}")
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def kill_trainer_rank(run: DrillJob) -> None:
    """Kill one trainer rank."""
    _kill(run.role_process(SECOND_NODE, "trainer-1"), "trainer-1")


def kill_node(run: DrillJob) -> None:
    """Kill a node with a trainer rank and an engine."""
    run.cluster.kill_node(SECOND_NODE)


def cut_link(run: DrillJob) -> None:
    """Cut the network link of a node for CUT_SECONDS."""
    run.cluster.cut(SECOND_NODE)
    try:
        time.sleep(CUT_SECONDS)
    finally:
        run.cluster.mend(SECOND_NODE)


def kill_control(run: DrillJob) -> None:
    """Kill the control service three times, and stop it for STOP_SECONDS."""
    killed: set[int] = set()
    for _ in range(3):
        process = run.wait_for(lambda: _other_control(run, killed), "control service", FAULT_SECONDS)
        process.send_signal(signal.SIGKILL)
        killed.add(process.pid)
        time.sleep(5.0)
    process = run.wait_for(lambda: _other_control(run, killed), "control service", FAULT_SECONDS)
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(STOP_SECONDS)
    finally:
        process.send_signal(signal.SIGCONT)


def _other_control(run: DrillJob, killed: set[int]) -> psutil.Process | None:
    process = run.role_process(FIRST_NODE, "control")
    return None if process is None or process.pid in killed else process


def fill_disk(run: DrillJob) -> None:
    """Fill the disk of the checkpoints until some could not be written."""
    filler = run.run_folder / "checkpoints" / "filler"
    descriptor = os.open(filler, os.O_CREAT | os.O_WRONLY)
    try:
        run.wait_for(lambda: _filled(descriptor), "full disk", FAULT_SECONDS)
        run.wait_for(
            lambda: run.newest_version() - run.checkpoint_version() > FAILED_CHECKPOINTS,
            "update without a checkpoint",
            FAULT_SECONDS,
        )
    finally:
        os.close(descriptor)
        filler.unlink()


def _filled(descriptor: int) -> bool:
    status = os.fstatvfs(descriptor)
    with suppress(OSError):  # a checkpoint under way has used some of that space meanwhile
        os.posix_fallocate(descriptor, 0, status.f_bavail * status.f_frsize - 2**20)
        return True
    return False


def freeze_disk(run: DrillJob) -> None:
    """Freeze the disk of the run's folder for FREEZE_SECONDS: writes wait, and no signal ends that."""
    last = run.newest_version()
    # In a session of its own: it thaws the disk also when the drill is killed, whose processes nothing else could end.
    commands = f'fsfreeze --freeze "$1" && sleep {FREEZE_SECONDS:g} && fsfreeze --unfreeze "$1"'
    process = subprocess.Popen(["sh", "-c", commands, "freeze", run.folder], start_new_session=True)
    if code := process.wait():
        raise DrillError(f"fsfreeze exited with code {code}")
    run.wait_for(lambda: run.newest_version() >= last + 3, "update after the thaw", FAULT_SECONDS)


def fill_shared_memory(run: DrillJob) -> None:
    """Leave no room in a node's /dev/shm until two updates have followed."""
    status = os.statvfs(run.cluster.path(SECOND_NODE, "/dev/shm"))
    used = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
    last = run.newest_version()
    _resize_shared_memory(run, f"{used + ROOM_KIB}k")
    try:
        run.wait_for(lambda: run.newest_version() >= last + 2, "update with a full /dev/shm", FAULT_SECONDS)
    finally:
        _resize_shared_memory(run, "50%")


def _resize_shared_memory(run: DrillJob, size: str) -> None:
    inside = ("nsenter", f"--target={run.cluster.first_process(SECOND_NODE)}", "--mount")
    subprocess.run([*inside, "mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)


def preempt_job(run: DrillJob) -> None:
    """Send the signal by which Slurm pre-empts a job (#SBATCH --signal)."""
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job_id)


TRAINERS = ((FIRST_NODE, "trainer-0"), (SECOND_NODE, "trainer-1"))
WORKERS = ((FIRST_NODE, "rollout-0"), (SECOND_NODE, "rollout-1"))

DRILLS = {
    drill.name: drill
    for drill in (
        Drill(
            "engine",
            "an engine is killed",
            kill_engine,
            must_survive=(*TRAINERS, WORKERS[0]),
            log_pattern="restarting rollout-1 ",
        ),
        Drill("browsers", "all browsers of a node are killed", kill_browsers, must_survive=(*TRAINERS, *WORKERS)),
        Drill(
            "trainer",
            "a trainer rank is killed",
            kill_trainer_rank,
            must_survive=WORKERS,
            log_pattern="trainer-1 killed by SIGKILL",
        ),
        Drill("node", "a node is lost", kill_node, requeued=True, lost_node=SECOND_NODE),
        Drill("link", f"a node's link is cut for {CUT_SECONDS:.0f} s", cut_link, must_survive=(*TRAINERS, *WORKERS)),
        Drill(
            "control",
            f"the control service is killed three times, and stopped for {STOP_SECONDS:.0f} s",
            kill_control,
            must_survive=(*TRAINERS, *WORKERS),
            log_pattern=r"starting it again \(restart 3 of 30 an hour\)",
            updates_after=30,
        ),
        Drill(
            "disk",
            "the checkpoints' disk is full",
            fill_disk,
            must_survive=(*TRAINERS, *WORKERS),
            on_disk="checkpoints",
        ),
        Drill(
            "freeze",
            f"the disk of the run's folder hangs for {FREEZE_SECONDS:.0f} s",
            freeze_disk,
            must_survive=(*TRAINERS, *WORKERS),
            on_disk="run",
            updates_after=10,
        ),
        Drill(
            "memory",
            "a neighbour fills a node's /dev/shm",
            fill_shared_memory,
            must_survive=(*TRAINERS, *WORKERS),
            updates_after=10,
        ),
        Drill("preempt", "the job is pre-empted", preempt_job, requeued=True, updates_after=30),
    )
}


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""
