"""Who may write to a run's folder: real processes that hold its lock, lose it, and take over."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track import run_lock
from megatron_webrl.track.run_lock import Launch, LaunchLost, launch_of_process, start_launch
from megatron_webrl.util.history import History, read
from tests.waiting import until

ROOT = Path(__file__).parents[2]
HOLDS = (
    "import sys, time; from pathlib import Path; from megatron_webrl.track.run_lock import start_launch\n"
    "environment = {'SLURM_JOB_ID': sys.argv[2]} if len(sys.argv) > 2 else {}\n"
    "with start_launch(Path(sys.argv[1]), environment): time.sleep(60)"
)
STARTS = (
    "import os, sys, time; from pathlib import Path; from megatron_webrl.track.run_lock import start_launch\n"
    "from megatron_webrl.config.setting import ConfigError\n"
    "sys.stdin.readline()\n"
    "try:\n"
    "    with start_launch(Path(sys.argv[1]), {}): time.sleep(1)\n"
    "except ConfigError: sys.exit(2)"
)
SUSPENDED = (
    "import os, signal, sys; from pathlib import Path\n"
    "from megatron_webrl.util.history import History\n"
    "from megatron_webrl.track.run_lock import start_launch\n"
    "suspended = [False]\n"
    "with start_launch(Path(sys.argv[1]), {'SLURM_JOB_ID': '17'}) as launch:\n"
    "    def guard():\n"
    "        launch.check()\n"
    "        if suspended[0]: os.kill(os.getpid(), signal.SIGSTOP)\n"
    "    history = History(Path(sys.argv[1], 'updates.jsonl'), guard=guard)\n"
    "    history.append({'launch': 1, 'version': 1})\n"
    "    suspended[0] = True\n"
    "    history.append({'launch': 1, 'version': 2})\n"
    "    history.close()\n"
)


def slurm(job: str, restart: int = 0) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)}


def started(run: Path, environment: dict[str, str] | None = None) -> Launch:
    """A launch whose process holds the lock no more."""
    with start_launch(run, environment or {}) as launch:
        return launch


@contextmanager
def process_that_holds(run: Path, *job: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run), *job], cwd=ROOT)
    try:
        until(lambda: (run / "launch.json").exists(), "the launch of another process", 30)
        yield process
    finally:
        process.kill()
        process.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_running_process_keeps_its_lock_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with process_that_holds(tmp_path) as process:
        for number in (0, signal.SIGSTOP):  # a stopped process may wake up
            process.send_signal(number) if number else None
            with pytest.raises(ConfigError, match=rf"a job runs in {tmp_path}, pid {process.pid} on .*; wait for its"):
                started(tmp_path)
    with start_launch(tmp_path, {}) as launch:
        assert launch.number == 2
        launch.check()
    assert names(tmp_path / "checkpoints") == [launch.staging.name]


def test_a_later_launch_of_a_slurm_job_takes_over_at_once_and_an_earlier_one_never(tmp_path: Path) -> None:
    with process_that_holds(tmp_path, "17"):
        first = launch_of_process(tmp_path, slurm("17"))
        assert first is not None
        with pytest.raises(ConfigError, match="launch 1 of job 17"):
            started(tmp_path, slurm("17"))
        with start_launch(tmp_path, slurm("17", 1)) as second:
            with pytest.raises(LaunchLost, match=rf"another launch has taken over {tmp_path}: launch 2 of job 17 on "):
                first.check()
            second.check()
            with pytest.raises(ConfigError, match=r"launch 2 of job 17 .*; wait for its end, or choose another"):
                started(tmp_path, slurm("17"))
        with pytest.raises(LaunchLost, match="launch 2 of job 17"):
            started(tmp_path, slurm("17"))


def test_the_lock_of_a_file_that_was_replaced_meanwhile_keeps_nobody_out_and_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count()

    def lock(descriptor: int, operation: int, real: Callable[[int, int], None] = fcntl.flock) -> None:
        if next(count) == 0:
            (tmp_path / run_lock.LOCK_FILE).unlink()  # by another launch of the job
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    with start_launch(tmp_path, {}), pytest.raises(ConfigError, match="a job runs in"):
        started(tmp_path)


def test_of_launches_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # all wait for it
    assert sorted(process.wait(60) for process in processes) == [0, 2, 2, 2]
    assert len(names(tmp_path / "checkpoints")) == 1


def test_the_staging_folder_of_an_earlier_launch_is_moved_away_with_its_content(tmp_path: Path) -> None:
    first = started(tmp_path)
    (first.staging / "000001").mkdir()
    (tmp_path / "checkpoints" / f"{run_lock.STAGING_PREFIX}000002").mkdir()  # killed before it was the newest
    second = started(tmp_path)
    assert (first.number, second.number) == (1, 3)
    for act in (
        lambda: (first.staging / "000001").rename(tmp_path / "checkpoints" / "version-000001"),
        (first.staging / "000002").mkdir,
    ):
        with pytest.raises(FileNotFoundError):
            act()
    assert [path.name for path in second.staging.glob("left-*/*")] == ["000001"]


def test_a_process_suspended_after_its_check_adds_no_line_to_a_history_of_its_successor(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SUSPENDED, str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "its suspension", 30)
        started(tmp_path, slurm("17", 1))
        history = History(tmp_path / "updates.jsonl")
        history.append({"launch": 2, "version": 2})
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0
        history.append({"launch": 2, "version": 3})
        history.close()
    finally:
        process.kill()
        process.wait()
    lines = [(line["launch"], line["version"]) for line in read(tmp_path / "updates.jsonl")]
    assert lines == [(1, 1), (2, 2), (2, 3)]
    assert names(tmp_path) == ["checkpoints", "launch.json", "lock", "updates.jsonl"]


def test_processes_find_their_launch_and_hold_its_lock(tmp_path: Path) -> None:
    assert launch_of_process(tmp_path, slurm("17")) is None
    first = started(tmp_path)
    assert launch_of_process(tmp_path, {}) is None
    assert launch_of_process(tmp_path, {run_lock.VARIABLE: "1"}) == first
    second = started(tmp_path, slurm("17"))
    assert launch_of_process(tmp_path, slurm("17")) == second
    for environment in (slurm("17", 1), {"SLURM_JOB_ID": "16"}, {run_lock.VARIABLE: "1"}):
        with pytest.raises(LaunchLost, match="launch 1 of job 17"):
            launch_of_process(tmp_path, environment)
    with second.locked(), pytest.raises(ConfigError, match="a job runs in"):
        started(tmp_path)
    started(tmp_path)
    with pytest.raises(LaunchLost), second.locked():
        pass


def test_a_file_system_without_locks_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with start_launch(tmp_path, {}) as launch:
        launch.check()
        assert started(tmp_path).number == 2
        with pytest.raises(LaunchLost):
            launch.check()
    assert "a second launch of the run would end this one" in caplog.text

    def fail(*_: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    launch = started(tmp_path)
    monkeypatch.setattr(Path, "read_text", fail)
    launch.check()  # it is no other launch
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be written: File exists; set run.directory to a folder"):
        started(tmp_path / "other")
