"""A run resumes after a crash at any file operation of publishing, resuming, requeueing and of growing histories.

A forked process is killed before an operation, with a torn write, or with a power loss that takes what was not synced
(tests/file_faults.py). After each crash the run is started again: its newest checkpoint must be complete and not older
than the last one that was published, its histories must be those of this checkpoint, and it must publish the next one.
`latest` only grows, and only the newest launch can move it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.launch.slurm.prepare import prepare_job, read_launches
from megatron_webrl.track import episodes, events, summary
from megatron_webrl.track.episodes import EpisodeLog
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch, launch_of_process, start_launch
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.util import atomic_file
from tests.file_faults import FileFaults, run_forked
from tests.trajectories import trajectory

EPISODES = 2  # of an update
KEEP = 2  # checkpoints
MEMORY = "/dev/shm"  # where fsync takes no time
EPISODE = trajectory(0, 0)
CRASHES: tuple[dict[str, Any], ...] = (
    {}, {"torn": True}, *({"power_loss": True, "seed": seed} for seed in range(3)),
)  # fmt: skip


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


Published = Callable[[int], object]
Scenario = Callable[[Path, Published], None]


def _start(folder: Path) -> Trainer:
    with start_launch(folder, {}) as launch:
        atomic_file.remove_leftovers(folder, 0.0)
        return Trainer(folder, launch)


def publish(folder: Path, published: Published) -> None:
    trainer = _start(folder)
    for _ in range(3):
        trainer.update()
        published(trainer.version)


def resume(folder: Path, published: Published) -> None:
    """Three launches, each of which makes one update more than it publishes."""
    for _ in range(3):
        trainer = _start(folder)
        trainer.update()
        published(trainer.version)
        for index in range(EPISODES):
            trainer.episodes.add(replace(EPISODE, ticket=99, index=index), None, 99)
        trainer.updates.append({"version": trainer.version + 1})


def requeue(folder: Path, published: Published) -> None:
    """The preparation of three launches of a Slurm job, with a checkpoint in each."""
    for restart in range(3):
        _prepare(folder, restart)
        launch = launch_of_process(folder, _environment(restart))
        assert launch is not None
        events.EventLog(folder).add(events.JOB, events.STARTED)
        trainer = Trainer(folder, launch)
        trainer.update()
        published(trainer.version)


def histories(folder: Path, published: Published) -> None:
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


SCENARIOS = (publish, resume, requeue, histories)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_published_checkpoint_survives_a_power_loss_right_after(scenario: Scenario) -> None:
    for count, seed in ((1, 0), (2, 1), (3, 3)):
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            crash_and_resume(Path(folder, "run"), scenario, 0, {"power_loss": True, "seed": seed}, after=count)


# One operation for each kind of crash; every hundredth one; with a stride of five, one kind for each operation.
@pytest.mark.parametrize(
    "stride",
    [
        1000,
        pytest.param(100, marks=pytest.mark.slow),
        pytest.param(5, marks=[pytest.mark.soak, pytest.mark.timeout(3000)]),
    ],
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_resumes_after_a_crash_at_any_file_operation(scenario: Scenario, stride: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        operations = count_operations(Path(folder), scenario)
    assert operations > 50
    stride = min(stride, operations)
    for number, crash in enumerate(CRASHES):
        for at in range(1 + number * stride // len(CRASHES), operations + 1, stride):
            with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                crash_and_resume(Path(folder, "run"), scenario, at, crash)


def count_operations(folder: Path, scenario: Scenario) -> int:
    found = folder / "operations"

    def job() -> None:
        with FileFaults(folder / "runs") as faults:
            scenario(folder / "runs" / "run", lambda version: None)
        found.write_text(str(faults.count))

    (folder / "runs").mkdir()
    assert run_forked(job) == 0
    return int(found.read_text())


def crash_and_resume(folder: Path, scenario: Scenario, at: int, crash: dict[str, Any], after: int = 0) -> None:
    """Crash a scenario at an operation, or after some publications, and start the run again."""
    case = f"{crash or 'kill'} before operation {at}, or after {after} publications"
    reading, writing = os.pipe()

    def job() -> None:
        left = [after]
        with FileFaults(folder.parent, at, **crash) as faults:

            def published(version: int) -> None:
                os.write(writing, bytes([version]))
                left[0] -= 1
                if left[0] == 0:
                    faults.crash()

            scenario(folder, published)

    assert run_forked(job) == -signal.SIGKILL, case
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        published = max(pipe.read(), default=0)
    shutil.rmtree(f"{folder.parent}.backups", ignore_errors=True)
    assert run_forked(lambda: verify(folder, scenario, published)) == 0, case  # its error is in stderr


def verify(folder: Path, scenario: Scenario, published: int) -> None:
    """Start the run again, and make two updates."""
    if scenario is requeue:
        _prepare(folder, 9)
        launch = launch_of_process(folder, _environment(9))
        assert launch is not None
        launches = [each.restart_count for each in read_launches(folder)]
        assert launches == sorted(set(launches))
        assert launches[-1] == 9
        trainer = Trainer(folder, launch)
    else:
        trainer = _start(folder)
    assert trainer.version >= published
    check_checkpoint(folder, trainer.version)
    for _ in range(2):
        versions = list(range(1, trainer.version + 1))
        assert [update["version"] for update in summary.read_updates(folder)] == versions
        tickets = [line["ticket"] for line in episodes.read_lines(folder)]
        assert tickets == [version for version in versions for _ in range(EPISODES)]
        trainer.update()
        check_checkpoint(folder, trainer.version)
    assert not [*folder.rglob("*.writing"), *trainer.launch.staging.iterdir()]


def check_checkpoint(folder: Path, version: int) -> None:
    newest = find_latest_checkpoint(folder)
    assert (newest is None) == (version == 0)
    for name in ("state.json", "megatron/shard.distcp") if newest is not None else ():
        assert json.loads((newest / name).read_text())["version"] == version


def launch(run: Path, restart: int) -> Launch:
    with start_launch(run, _environment(restart)) as started:
        return started


def written(launch: Launch, version: int) -> Path:
    return files.make_empty_folder(files.temporary_folder(launch.staging, version))


def test_latest_never_goes_back(tmp_path: Path) -> None:
    own = launch(tmp_path, 0)
    for version, name in ((5, "version-000005"), (6, "version-000006"), (6, "version-000006.1")):
        assert files.commit(written(own, version), version).name == name
    with pytest.raises(CheckpointError, match=r"names version-000006\.1, which is newer than version 4"):
        files.commit(written(own, 4), 4)
    newest = find_latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "version-000006.1"
    for keep, obsolete in ((1, {"version-000005", "version-000006"}), (2, {"version-000006"})):
        assert {path.name for path in files.obsolete_checkpoints(newest, keep)} == obsolete
    (tmp_path / "checkpoints" / "latest").write_text("version-000005/\n")  # a user goes back
    assert files.obsolete_checkpoints(tmp_path / "checkpoints" / "version-000005", 1) == []  # later ones stay
    assert files.commit(written(own, 6), 6).name == "version-000006.2"
    shutil.rmtree(tmp_path / "checkpoints" / "version-000006")  # older copies are deleted
    assert files.commit(written(own, 6), 6).name == "version-000006.3"


def test_a_launch_that_has_a_successor_can_neither_commit_nor_delete(tmp_path: Path) -> None:
    zombie = launch(tmp_path, 0)
    first = files.commit(written(zombie, 1), 1)
    temporary = written(zombie, 2)
    files.commit(written(launch(tmp_path, 1), 2), 2)
    for attempt in (
        lambda: files.commit(temporary, 2),
        lambda: written(zombie, 3),
        lambda: files.delete_checkpoints([first], zombie.staging),
    ):
        with pytest.raises(FileNotFoundError):
            attempt()
    newest = find_latest_checkpoint(tmp_path)
    assert newest is not None
    assert (newest.name, first.is_dir()) == ("version-000002", True)
