"""Soak: a whole job for hours, with a fault of random kind every two minutes.

    python -m tools.soak [--minutes 180] [--every 120] [--seed 0] [--folder FOLDER] [--json FILE]

Trains a tiny model on this machine (`webrl train`: trainer, vLLM engine, Chromium), and kills, or stops for a while, a
process at random. At the end the job is interrupted as by Ctrl-C, and must have an exact account of its episodes, no
ticket run twice or with another task, no process and no shared memory left. Files and memory of the launcher and of the
control service, which live as long as the job, must not grow by more than a tenth, and no process may stay a zombie.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

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
LASTING = ("launcher", "control")  # control: of one life, unless it was killed
SETTINGS = (
    "trainer.updates=1000000", "trainer.checkpoint.every=5", "run.worker_restarts_per_hour=1000",
    "run.max_trainer_restarts=100", "run.heartbeat_timeout_seconds=60", "run.startup_timeout_seconds=600",
)  # fmt: skip


@dataclass
class Soak:
    """A running job, its faults, and samples of its processes."""

    job: Job
    chance: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))  # files, MiB by role
    zombies: dict[int, float] = field(default_factory=dict)  # since when, by pid
    problems: list[str] = field(default_factory=list)

    def run(self, seconds: float, every: float, show: Callable[[float, str], None]) -> None:
        """Inject faults for a while. Each is followed by an update within RECOVERY_SECONDS."""
        self.job.until(self.job.updates, "a first update", 600)
        started = time.monotonic()
        next_fault = started + every / 2
        while (now := time.monotonic()) < started + seconds:
            self._sample()
            if now >= next_fault:
                next_fault += every
                self._inject()
            show((now - started) / seconds, f"{len(self.job.updates())} updates, {self.faults.total()} faults")
            time.sleep(SAMPLE_SECONDS)

    def _inject(self) -> None:
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
        waiting = {p.pid: p for p in launcher.children(recursive=True) if _is_zombie(p)}
        self.zombies = {pid: self.zombies.get(pid, time.monotonic()) for pid in waiting}
        for pid, since in self.zombies.items():
            if time.monotonic() - since > ZOMBIE_SECONDS:
                self.zombies[pid] = math.inf  # reported once
                with suppress(psutil.Error):
                    parent, name = waiting[pid].parent(), waiting[pid].name()
                    owner = " ".join(parent.cmdline()[:6]) if parent is not None else "nobody"
                    self.problems.append(f"{name} ({pid}), a child of {owner}, is a zombie for {ZOMBIE_SECONDS:.0f} s")

    def finish(self) -> None:
        """End the job as Ctrl-C does, and check what it leaves."""
        assert self.job.process is not None
        self.job.process.send_signal(signal.SIGINT)
        if (code := self.job.wait(RECOVERY_SECONDS)) != 130:
            self.problems.append(f"the job exited with code {code}:\n{self.job.output()[-4000:]}")
            return
        found = run_problems(self.job.run_folder, len(self.job.updates()), OPEN_AT_END)
        self.problems += [problem for problem in found if problem != "the outcome is stopped"]
        try:
            assert_nothing_left(self.job)
        except AssertionError as error:
            self.problems.append(f"the job left something: {error}")
        for name in LASTING:
            self.problems += growth_problems(name, self.samples[name])

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


def _below(job: Job, role: str, word: str) -> list[psutil.Process]:
    found = [p for p in _role(job, role).children(recursive=True) if word in " ".join([p.name(), *p.cmdline()])]
    if not found:
        raise LookupError(word)
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.kill()


def _stop(process: psutil.Process) -> None:
    process.suspend()
    try:
        time.sleep(STOP_SECONDS)
    finally:
        process.resume()


ROLES = ("control", "trainer-0", "rollout-0")
FAULTS: dict[str, Callable[[Job], None]] = {
    "kill the trainer": lambda job: _role(job, "trainer-0").kill(),
    "kill the worker": lambda job: _role(job, "rollout-0").kill(),
    "kill the engine": lambda job: _below(job, "rollout-0", "EngineCore")[0].kill(),
    "kill all browsers": lambda job: _kill(_below(job, "rollout-0", "chrom")),
    "kill the control service": lambda job: _role(job, "control").kill(),
    "stop the trainer": lambda job: _stop(_role(job, "trainer-0")),
    "stop the worker": lambda job: _stop(_role(job, "rollout-0")),
    "stop the control service": lambda job: _stop(_role(job, "control")),
}


def main() -> int:
    """Run the soak; returns 0 if all goals hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    minutes = bounded_number(float, 0, exclusive=True)
    parser.add_argument("--minutes", type=minutes, default=180.0, metavar="N", help="length (default: 180)")
    parser.add_argument("--every", type=minutes, default=120.0, metavar="SECONDS", help="between faults (default: 120)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (default: 0)")
    parser.add_argument("--folder", type=Path, help="keep the run here (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="webrl-soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        job = Job(folder, make_tiny_model(folder / "model"), name="soak")
        soak = Soak(job, random.Random(options.seed))
        try:
            job.start(*SETTINGS)
            with Progress(*Progress.get_default_columns()[:3], TimeRemainingColumn(), TextColumn("{task.fields[now]}"),
                          console=console) as bar:  # fmt: skip
                task = bar.add_task("soak", total=1.0, now="starting")
                soak.run(
                    options.minutes * 60, options.every, lambda share, now: bar.update(task, completed=share, now=now)
                )
            soak.finish()
        except AssertionError as error:  # of a wait: the job ended, or stood still
            soak.problems.append(str(error))
        finally:
            job.close()
        figures = soak.figures() if (job.run_folder / "summary.json").is_file() else {}
    for name, value in figures.items():
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    for problem in soak.problems:
        console.print(f"FAILED: {problem}", markup=False, soft_wrap=True)
    write_json(options.json, {"figures": figures, "problems": soak.problems})
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
