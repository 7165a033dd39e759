"""Drill: a run resumes after a crash at any of its file operations.

    python -m tools.drills.crash_points [--quick] [--json FILE]

Runs the file operations of a trainer that publishes checkpoints, of a start that resumes, of a Slurm job that is
requeued, and of histories that grow, through the functions of the package. A forked process is killed before each
operation, with a torn write, and with power losses that take what was not synced (tools/drills/file_faults.py). After
each crash the run is started again: its newest checkpoint must be complete and not older than the last one that was
published, its histories must be those of this checkpoint, and the next checkpoint must be published.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_webrl.config.load import parse_config
from megatron_webrl.launch.slurm.prepare import prepare_job, read_launches
from megatron_webrl.track import episodes, events, summary
from megatron_webrl.track.episodes import EpisodeLog
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch, launch_of_process, start_launch
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.util import atomic_file
from tests.trajectories import trajectory
from tools.drills.file_faults import FileFaults, run_forked
from tools.drills.report import Findings, run

EPISODES = 2  # of an update
KEEP = 2  # checkpoints
GOAL_POINTS = 1000
STRIDE, SHORT_STRIDE = 1, 15  # operations from one crash point to the next
MEMORY = "/dev/shm"  # where fsync takes no time
EPISODE = trajectory(0, 0)


@dataclass(frozen=True)
class Crash:
    """How a process is killed."""

    torn: bool = False
    power_loss: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"power loss {self.seed}" if self.power_loss else "torn write" if self.torn else "kill"


LONG = (Crash(), Crash(torn=True), *(Crash(power_loss=True, seed=seed) for seed in range(3)))
SHORT = (Crash(), Crash(power_loss=True), Crash(power_loss=True, seed=1))


class Trainer:
    """The files of a trainer: histories, and checkpoints whose content can be verified."""

    def __init__(self, folder: Path, launch: Launch) -> None:
        """Resume from the newest checkpoint, as the coordinator and the checkpointer do."""
        self.folder, self.launch = folder, launch
        checkpoint = find_latest_checkpoint(folder)
        state = {"version": 0, "episode_log_bytes": 0}
        if checkpoint is not None:
            state = json.loads((checkpoint / "state.json").read_text())
        self.version = state["version"]
        files.delete_leftovers(launch.staging)
        closed = self.version * EPISODES
        episodes.roll_back(folder, closed, (), state["episode_log_bytes"])
        self.episodes = EpisodeLog(folder, closed, state["episode_log_bytes"], launch.check)
        self.updates = summary.open_updates(folder, self.version, launch.check)

    def update(self) -> None:
        """Log an update and publish its checkpoint."""
        self.version += 1
        for index in range(EPISODES):
            self.episodes.add(replace(EPISODE, ticket=self.version, index=index), None, self.version)
        self.updates.append({"version": self.version})
        self.episodes.history.sync()
        self.updates.sync()
        temporary = files.make_empty_folder(files.temporary_folder(self.launch.staging, self.version))
        for name in ("megatron/shard.distcp", "state.json"):
            state = {"version": self.version, "episode_log_bytes": self.episodes.size}
            (temporary / name).write_text(json.dumps(state))
        atomic_file.fsync_tree(temporary)
        newest = files.commit(temporary, self.version)
        files.delete_checkpoints(files.obsolete_checkpoints(newest, KEEP), self.launch.staging)


def _start(folder: Path) -> Trainer:
    with start_launch(folder, {}) as launch:
        atomic_file.remove_leftovers(folder, 0.0)
        return Trainer(folder, launch)


def publish(folder: Path, published: Callable[[int], object]) -> None:
    """Publish three checkpoints in one launch."""
    trainer = _start(folder)
    for _ in range(3):
        trainer.update()
        published(trainer.version)


def resume(folder: Path, published: Callable[[int], object]) -> None:
    """Two launches, each of which makes one update more than it publishes."""
    for _ in range(2):
        trainer = _start(folder)
        trainer.update()
        published(trainer.version)
        for index in range(EPISODES):
            trainer.episodes.add(replace(EPISODE, ticket=99, index=index), None, 99)
        trainer.updates.append({"version": trainer.version + 1})


def requeue(folder: Path, published: Callable[[int], object]) -> None:
    """The preparation of three launches of a Slurm job, with a checkpoint in each."""
    for restart in range(3):
        _prepare(folder, restart)
        launch = launch_of_process(folder, _environment(restart))
        assert launch is not None
        events.EventLog(folder).add(events.JOB, events.STARTED)
        trainer = Trainer(folder, launch)
        trainer.update()
        published(trainer.version)


def histories(folder: Path, published: Callable[[int], object]) -> None:
    """Histories that grow by many lines between two checkpoints, with several writers."""
    trainer = _start(folder)
    for number in range(4):
        for index in range(6):
            trainer.episodes.add(replace(EPISODE, ticket=77, index=index), None, 99)
            EventLog(folder, node=number).add(f"rollout-{index}", events.STARTED)
        trainer = _start(folder)
        trainer.update()
        published(trainer.version)


def _environment(restart: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restart)}


def _prepare(folder: Path, restart: int) -> None:
    resumed = restart > 0 and find_latest_checkpoint(folder) is not None
    config = parse_config(
        None, [f"run.directory={folder.parent}", f"run.name={folder.name}", f"run.resume={str(resumed).lower()}",
               "model.path=/nowhere", "run.max_trainer_restarts=100", "cluster.gpus_per_node=0"],
    )  # fmt: skip
    prepare_job(config, True, lambda message: None, _environment(restart))


SCENARIOS = {scenario.__name__: scenario for scenario in (publish, resume, requeue, histories)}


def measure(quick: bool) -> Findings:
    """Crash at each operation of each scenario; in the short form at every fifteenth, others for each kind of crash."""
    findings, points, found = Findings(), 0, Counter[str]()
    crashes, stride = (SHORT, SHORT_STRIDE) if quick else (LONG, STRIDE)
    for name, scenario in SCENARIOS.items():
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            operations = _count(Path(folder), scenario)
        findings.figures[f"operations of {name}"] = operations
        for number, crash in enumerate(crashes):
            for at in range(1 + number * stride // len(crashes), operations + 1, stride):
                with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                    problem = _crash(Path(folder, "run"), name, at, crash)
                points += 1
                found[str(crash).rstrip(" 0123456789")] += 1
                if problem is not None:
                    findings.problems.append(f"{name}, {crash} before operation {at}: {problem}")
    findings.figures |= {f"crash points: {kind}": count for kind, count in found.items()}
    findings.figures |= {"crash points": points, "resumed": points - len(findings.problems)}
    findings.expect(quick or points >= GOAL_POINTS, f"{points} crash points are fewer than {GOAL_POINTS}")
    return findings


def _count(folder: Path, scenario: Callable[[Path, Callable[[int], object]], None]) -> int:
    reading, writing = os.pipe()

    def job() -> None:
        with FileFaults(folder) as faults:
            scenario(folder / "run", lambda version: None)
        os.write(writing, str(faults.count).encode())

    assert run_forked(job) == 0
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return int(pipe.read())


def _crash(folder: Path, name: str, at: int, crash: Crash) -> str | None:
    """Crash a scenario, start the run again, and return what is wrong with it, if anything."""
    reading, writing = os.pipe()

    def job() -> None:
        with FileFaults(folder.parent, at, torn=crash.torn, power_loss=crash.power_loss, seed=crash.seed):
            SCENARIOS[name](folder, lambda version: os.write(writing, bytes([version])))

    code = run_forked(job)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        published = max(pipe.read(), default=0)
    shutil.rmtree(f"{folder.parent}.backups", ignore_errors=True)
    if code != -signal.SIGKILL:
        return f"the process was not killed but ended with {code}"
    problems = folder.parent / "problems"
    code = run_forked(lambda: problems.write_text("\n".join(_verify(folder, name, published))))
    return f"the next start ended with {code}" if code else problems.read_text() or None


def _verify(folder: Path, name: str, published: int) -> list[str]:
    """Start the run again, and make an update; returns what is wrong."""
    problems = []
    if name == "requeue":
        _prepare(folder, 9)
        launch = launch_of_process(folder, _environment(9))
        assert launch is not None
        launches = [launch.restart_count for launch in read_launches(folder)]
        if launches != sorted(set(launches)) or launches[-1] != 9:
            problems.append(f"launches {launches}")
        trainer = Trainer(folder, launch)
    else:
        trainer = _start(folder)
    if trainer.version < published:
        problems.append(f"resumes from version {trainer.version}, but {published} was published")
    problems += _checkpoint_problems(folder, trainer.version)
    for _ in range(2):
        updates = [update["version"] for update in summary.read_updates(folder)]
        if updates != list(range(1, trainer.version + 1)):
            problems.append(f"updates {updates} at version {trainer.version}")
        tickets = [line["ticket"] for line in episodes.read_lines(folder)]
        if tickets != [version for version in range(1, trainer.version + 1) for _ in range(EPISODES)]:
            problems.append(f"episodes of {tickets} at version {trainer.version}")
        trainer.update()
        problems += _checkpoint_problems(folder, trainer.version)
    if left := [path.name for path in folder.rglob("*.writing")] + [
        path.name for path in trainer.launch.staging.iterdir()
    ]:
        problems.append(f"left over: {left}")
    return problems


def _checkpoint_problems(folder: Path, version: int) -> list[str]:
    newest = find_latest_checkpoint(folder)
    if newest is None:
        return [f"no checkpoint at version {version}"] if version else []
    states = [json.loads((newest / name).read_text())["version"] for name in ("state.json", "megatron/shard.distcp")]
    return [] if states == [version, version] else [f"{newest.name} holds {states}, not {version}"]


if __name__ == "__main__":
    sys.exit(run("crash_points", __doc__.split("\n")[0], measure))
