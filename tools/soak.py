"""Soak: a whole job for hours, with a fault of random kind every two minutes.

    python -m tools.soak [--minutes 180] [--every 120] [--seed 0] [--folder FOLDER] [--json FILE]

Trains a tiny model on this machine (`webrl train`: trainer, vLLM engine, Chromium), and kills, or stops for a while, a
process at random. At the end the job is interrupted as by Ctrl-C, and must have an exact account of its episodes, no
ticket run twice or with another task, no process and no shared memory left. Files and memory of the launcher and of the
control service, which live as long as the job, must not grow by more than a tenth, and no process may stay a zombie.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.finished_runs import run_problems
from tests.launch.whole_jobs import Job, assert_nothing_left
from tools.arguments import bounded_number, write_json
from tools.make_tiny_model import make_tiny_model

SAMPLE_SECONDS = 5.0
STOP_SECONDS = 10.0  # for which a process is stopped: less than the limits after which it counts as lost
RECOVERY_SECONDS = 300.0  # for the next update after a fault
ZOMBIE_SECONDS = 60.0
OPEN_AT_END = 8  # tickets in flight
LARGEST_GROWTH = 1.1
ROLES = ("control", "trainer-0", "rollout-0")
LASTING = ("launcher", "control")  # control: of one life, unless it was killed
SETTINGS = (
    "trainer.updates=1000000", "trainer.checkpoint.every=5", "run.worker_restarts_per_hour=1000",
    "run.max_trainer_restarts=100", "run.heartbeat_timeout_seconds=60", "run.startup_timeout_seconds=600",
)  # fmt: skip


class Soak:
    """A running job, its faults, and samples of its processes."""

    def __init__(self, job: Job, chance: random.Random) -> None:
        self.job, self.chance = job, chance
        self.faults = Counter[str]()
        self.recovery_seconds = defaultdict[str, list[float]](list)
        self.samples = defaultdict[str, list[tuple[int, int]]](list)  # files, MiB by role
        self.zombies: dict[psutil.Process, float] = {}  # since when

    def run(self, seconds: float, every: float) -> None:
        """Inject faults for a while, then end the job as Ctrl-C does. Raises AssertionError."""
        self.job.until(self.job.updates, "a first update", 600)
        started = time.monotonic()
        next_fault = started + every / 2
        while (now := time.monotonic()) < started + seconds:
            self._sample()
            if now >= next_fault:
                next_fault += every
                self._inject()
                print(f"{now - started:.0f} s: {len(self.job.updates())} updates, {dict(self.faults)}", flush=True)
            time.sleep(SAMPLE_SECONDS)
        assert self.job.process is not None
        self.job.process.send_signal(signal.SIGINT)
        assert self.job.wait(RECOVERY_SECONDS) == 130, self.job.output()[-4000:]
        found = run_problems(self.job.run_folder, len(self.job.updates()), OPEN_AT_END)
        assert found in ([], ["the outcome is stopped"]), found
        assert_nothing_left(self.job)
        for name in LASTING:
            growth = growth_problems(name, self.samples[name])
            assert not growth, growth

    def _inject(self) -> None:
        """A fault, which an update follows within RECOVERY_SECONDS."""
        name, inject = self.chance.choice(list(FAULTS.items()))
        made, began = len(self.job.updates()), time.monotonic()
        try:
            inject(self.job)
        except (psutil.Error, LookupError):  # it is being restarted
            self.faults[f"{name} (no target)"] += 1
            return
        self.faults[name] += 1
        self.job.until(lambda: len(self.job.updates()) > made, f"update after the fault {name!r}", RECOVERY_SECONDS)
        self.recovery_seconds[name].append(time.monotonic() - began)

    def _sample(self) -> None:
        assert self.job.process is not None
        launcher = psutil.Process(self.job.process.pid)
        for name, process in (("launcher", launcher), *((name, self.job.role(name)) for name in ROLES)):
            with suppress(psutil.Error):
                if process is not None:
                    self.samples[name].append((process.num_fds(), process.memory_info().rss // 2**20))
        now, zombies = time.monotonic(), [p for p in launcher.children(recursive=True) if _is_zombie(p)]
        self.zombies = {process: self.zombies.get(process, now) for process in zombies}
        assert now - min(self.zombies.values(), default=now) < ZOMBIE_SECONDS, f"zombies: {zombies}"

    def figures(self) -> dict[str, Any]:
        """What was measured."""
        content = self.job.summary()
        return {
            "updates": len(content["updates"]),
            "accounting": content["accounting"],
            "faults": dict(self.faults),
            "median seconds to the next update": {
                name: round(statistics.median(seconds), 1) for name, seconds in self.recovery_seconds.items()
            },
            "files and MiB, first and last tenth": {
                name: [*_ends([files for files, _ in each]), *_ends([mib for _, mib in each])]
                for name, each in self.samples.items()
            },
        }


def growth_problems(name: str, samples: list[tuple[int, int]]) -> list[str]:
    """Where files or memory of a process grew by more than LARGEST_GROWTH from the first to the last tenth."""
    problems = []
    for what, values in zip(("files", "MiB of memory"), zip(*samples, strict=True), strict=True):
        first, last = _ends(list(values))
        if last > first * LARGEST_GROWTH + 2:
            problems.append(f"{name} had {first:g} {what} at first, {last:g} at last")
    return problems


def _ends(values: list[int]) -> tuple[float, float]:
    share = max(1, len(values) // 10)
    return statistics.median(values[:share]), statistics.median(values[-share:])


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


def _role(job: Job, name: str) -> psutil.Process:
    if (process := job.role(name)) is None:
        raise LookupError(name)
    return process


def _kill_below(job: Job, word: str) -> None:
    """Kill the processes of the worker whose name or command has a word."""
    below = _role(job, "rollout-0").children(recursive=True)
    found = [process for process in below if word in " ".join([process.name(), *process.cmdline()])]
    if not found:
        raise LookupError(word)
    for process in found:
        process.kill()


def _stop(process: psutil.Process) -> None:
    process.suspend()
    try:
        time.sleep(STOP_SECONDS)
    finally:
        process.resume()


FAULTS: dict[str, Callable[[Job], None]] = {
    "kill the trainer": lambda job: _role(job, "trainer-0").kill(),
    "kill the worker": lambda job: _role(job, "rollout-0").kill(),
    "kill the engine": lambda job: _kill_below(job, "EngineCore"),
    "kill all browsers": lambda job: _kill_below(job, "chrom"),
    "kill the control service": lambda job: _role(job, "control").kill(),
    "stop the trainer": lambda job: _stop(_role(job, "trainer-0")),
    "stop the worker": lambda job: _stop(_role(job, "rollout-0")),
    "stop the control service": lambda job: _stop(_role(job, "control")),
}


def main() -> int:
    """Run the soak; returns 0 if all goals hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = bounded_number(float, 0, exclusive=True)
    parser.add_argument("--minutes", type=positive, default=180.0, metavar="N", help="length (default: 180)")
    parser.add_argument("--every", type=positive, default=120.0, metavar="SECONDS", help="between faults")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (default: 0)")
    parser.add_argument("--folder", type=Path, help="keep the run here (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    problem = ""
    with tempfile.TemporaryDirectory(prefix="webrl-soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        job = Job(folder, make_tiny_model(folder / "model"), name="soak")
        soak = Soak(job, random.Random(options.seed))
        try:
            job.start(*SETTINGS)
            soak.run(options.minutes * 60, options.every)
        except AssertionError as error:
            problem = str(error)
        finally:
            job.close()
        figures = soak.figures() if (job.run_folder / "summary.json").is_file() else {}
    write_json(options.json, figures | {"problem": problem})
    print(json.dumps(figures, indent=1), f"FAILED: {problem}" if problem else "passed", sep="\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
