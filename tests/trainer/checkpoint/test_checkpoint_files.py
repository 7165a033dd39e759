"""Names of checkpoints on disk: `latest` only grows, and only the newest launch can move it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track.latest_checkpoint import fallback_of, find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch, start_launch
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError


def launch(run: Path, restart: int, fallback_folder: Path | str = "") -> Launch:
    environment = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restart)}
    with start_launch(run, environment, fallback_folder=str(fallback_folder)) as started:
        return started


def written(launch: Launch, version: int, folder: Path | None = None) -> Path:
    return files.make_empty_folder(files.temporary_folder(launch.staging_in(folder or launch.run_folder), version))


def fallback(run: Path, fallback_folder: Path) -> Path:
    found = fallback_of(run, str(fallback_folder))
    assert found is not None
    return found


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


def test_the_newest_checkpoint_of_a_run_may_be_in_its_fallback_folder(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    own = launch(run, 0, other)
    elsewhere = fallback(run, other)
    files.commit(written(own, 1), 1)
    saved = files.commit(written(own, 2, elsewhere), 2)
    assert find_latest_checkpoint(run) == saved == elsewhere / "checkpoints" / "version-000002"
    own = launch(run, 1)  # without the setting
    with pytest.raises(CheckpointError, match="is newer than version 1"):
        files.commit(written(own, 1), 1)
    again = files.commit(written(own, 2), 2)
    assert find_latest_checkpoint(run) == again == run / "checkpoints" / "version-000002.1"


def test_runs_of_one_name_have_different_fallback_folders_and_a_run_keeps_its_own(tmp_path: Path) -> None:
    runs, other = [tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "other"
    for run in runs:
        launch(run, 0, other)
    assert len({fallback(run, other) for run in runs}) == 2
    before = fallback(runs[0], other)
    launch(runs[0], 1, other)
    assert fallback(runs[0], other) == before
    launch(runs[0], 2, tmp_path / "third")
    assert fallback(runs[0], tmp_path / "third").parent == tmp_path / "third"
    assert fallback(runs[0], other) == before
    assert fallback_of(runs[0], "") is None


def test_a_launch_that_has_a_successor_cannot_commit_in_the_fallback_folder(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    zombie = launch(run, 0, other)
    elsewhere = fallback(run, other)
    temporary = written(zombie, 2, elsewhere)
    launch(run, 1)
    for attempt in (lambda: files.commit(temporary, 2), lambda: written(zombie, 3, elsewhere)):
        with pytest.raises(FileNotFoundError):
            attempt()
    assert find_latest_checkpoint(run) is None


def test_a_launch_is_refused_while_a_fallback_folder_is_away_or_cannot_be_written(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    launch(run, 0, other)
    other.rename(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"the newest checkpoint may be there: mount it, or remove"):
        launch(run, 1)
    (tmp_path / "unmounted").rename(other)
    launch(run, 2)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"fallback_folder=.*file: (Not a directory|File exists)"):
        launch(tmp_path / "second", 0, tmp_path / "file")
