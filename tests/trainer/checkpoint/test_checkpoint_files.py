"""Names of checkpoints on disk: `latest` only grows, and only the newest launch can move it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch, start_launch
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError


def launch(run: Path, restart: int) -> Launch:
    environment = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restart)}
    with start_launch(run, environment) as started:
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
    (tmp_path / "checkpoints" / "latest").write_text("version-000005/\n")  # a user goes back
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
