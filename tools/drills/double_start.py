"""Drill: neither a second launch nor a zombie moves a run back.

    python -m tools.drills.double_start [--quick] [--json FILE]

50 times (4 in the short form), with small real processes over the functions of the package: four launches start at
once, of which one may win; and a trainer is suspended before a random one of its file operations, as on a node that
loses its network, while a requeued launch takes over, publishes checkpoints, and lets the zombie wake up. `latest` may
never go back, and the zombie must end with an error and leave the histories alone: all but the one operation before
which it was suspended, for which a file system has no lock.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track import episodes, summary
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch, LaunchLost, start_launch
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from tools.drills.crash_points import EPISODES, MEMORY, Trainer
from tools.drills.file_faults import FileFaults
from tools.drills.report import Findings, run

ROUNDS, SHORT_ROUNDS = 50, 4
LAUNCHES = 4  # at once
UPDATES = 4  # of each launch
OPERATIONS = 70  # the zombie is suspended before one of its first operations
LIMIT_SECONDS = 60.0
HISTORY_OPERATIONS = ("write", "ftruncate")
ENDED, REFUSED, LOST = 0, 2, 3  # exit codes


def measure(quick: bool) -> Findings:
    """Start twice, and wake a zombie, many times."""
    findings, rng, counts = Findings(), random.Random(19), Counter[str]()
    rounds = SHORT_ROUNDS if quick else ROUNDS
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            findings.problems += [f"double start {number}: {text}" for text in _double_start(Path(name, "run"), counts)]
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            at = rng.randint(1, OPERATIONS)
            findings.problems += [f"zombie {number}, {at}: {text}" for text in _zombie(Path(name, "run"), at, counts)]
    findings.figures = {"double starts": rounds, "zombies": rounds, **counts}
    return findings


def _double_start(folder: Path, counts: Counter[str]) -> list[str]:
    launches = [_Process(lambda: _launch(folder, {})) for _ in range(LAUNCHES)]
    problems = _watch(folder, launches, lambda newest: None)
    codes = [launch.code for launch in launches]
    counts["launches at once that ran"] += codes.count(ENDED)
    counts["launches at once that were refused"] += codes.count(REFUSED)
    if set(codes) - {ENDED, REFUSED} or ENDED not in codes:
        problems.append(f"exit codes {codes}")
    return problems + _history_problems(folder)


def _zombie(folder: Path, at: int, counts: Counter[str]) -> list[str]:
    zombie = _Process(lambda: _launch(folder, _slurm(0), at))
    _until(lambda: zombie.is_stopped or zombie.has_ended)
    before = _version(folder)
    successor = _Process(lambda: _launch(folder, _slurm(1)))

    def wake(version: int) -> None:
        if version > before or successor.has_ended:
            zombie.wake()

    problems = _watch(folder, [zombie, successor], wake)
    counts["zombies that ended with an error"] += zombie.code == LOST
    if (zombie.code, successor.code) != (LOST, ENDED):
        problems.append(f"the zombie ended with {zombie.code}, its successor with {successor.code}")
    if _version(folder) != before + UPDATES:
        problems.append(f"latest names version {_version(folder)}, not {before + UPDATES}")
    operation = Path(f"{folder.parent}.suspended")
    under_way, found = operation.read_text() in HISTORY_OPERATIONS, _history_problems(folder)
    operation.unlink()
    counts["zombies suspended in an operation on a history"] += under_way
    counts["zombies whose operation under way changed a history"] += bool(found)
    return problems + ([] if under_way else found)


def _launch(folder: Path, environment: Mapping[str, str], suspended_at: int = 0) -> int:
    """Publish UPDATES checkpoints; returns the exit code."""
    launch: Launch | None = None
    try:
        with FileFaults(folder.parent, suspended_at, suspend=True), start_launch(folder, environment) as launch:
            trainer = Trainer(folder, launch)
            for _ in range(UPDATES):
                launch.check()
                trainer.update()
    except LaunchLost:
        return LOST
    except (CheckpointError, OSError):  # as a checkpoint that fails: the launch is checked before the next update
        return ENDED if launch is not None and _is_newest(launch) else LOST
    except ConfigError:
        return LOST if suspended_at else REFUSED
    return ENDED


def _is_newest(launch: Launch) -> bool:
    try:
        launch.check()
    except LaunchLost:
        return False
    return True


def _slurm(restart: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restart)}


class _Process:
    """A forked process that ends with the exit code that `work` returns."""

    def __init__(self, work: Callable[[], int]) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = work()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)

    @property
    def has_ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    @property
    def is_stopped(self) -> bool:
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def wake(self) -> None:
        if not self.has_ended:
            os.kill(self.pid, signal.SIGCONT)


def _watch(folder: Path, processes: list[_Process], on_version: Callable[[int], None]) -> list[str]:
    """Follow `latest` until all processes have ended; returns what went wrong."""
    problems, version = [], 0
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        ended = not [process for process in processes if not process.has_ended]  # before the last look
        if (newest := _version(folder)) < version:
            problems.append(f"latest went back from {version} to {newest}")
        version = newest
        on_version(version)
        if ended:
            return problems
        if time.monotonic() > deadline:
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
            return [*problems, f"not all processes ended within {LIMIT_SECONDS:.0f} s"]
        time.sleep(0.0005)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the process was not suspended")
        time.sleep(0.0005)


def _version(folder: Path) -> int:
    newest = find_latest_checkpoint(folder)
    return int(newest.name[8:14]) if newest is not None else 0


def _history_problems(folder: Path) -> list[str]:
    """The histories are those of the newest checkpoint."""
    version = _version(folder)
    updates = [update["version"] for update in summary.read_updates(folder)]
    tickets = [line["ticket"] for line in episodes.read_lines(folder)]
    right = updates == list(range(1, version + 1)) and tickets == [each for each in updates for _ in range(EPISODES)]
    return [] if right else [f"version {version} with updates {updates} and episodes of {tickets}"]


if __name__ == "__main__":
    sys.exit(run("double_start", __doc__.split("\n")[0], measure))
