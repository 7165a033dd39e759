"""Which checkpoints stay, and which are not even begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.trainer import CheckpointConfig
from megatron_webrl.track.run_lock import start_launch
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState


def test_the_last_versions_stay_and_so_do_the_one_that_latest_names_and_those_above_it(tmp_path: Path) -> None:
    with start_launch(tmp_path, {}) as launch:

        def commit(version: int) -> Path:
            return files.commit(files.make_empty_folder(files.temporary_folder(launch.staging, version)), version)

        first, second, third = map(commit, (1, 2, 3))
        assert [files.obsolete_checkpoints(third, keep) for keep in (1, 2, 3)] == [[first, second], [first], []]
        latest = tmp_path / "checkpoints" / "latest"
        latest.write_text(second.name)  # a user goes back
        copy, newest = commit(2), commit(2)
        assert newest.name == "version-000002.2"
        assert files.obsolete_checkpoints(newest, 1) == [first, second, copy]
        files.delete_checkpoints([copy], launch.staging)
        latest.write_text(second.name)
        between = commit(2)  # its name is free again
        assert (between, files.obsolete_checkpoints(between, 1)) == (copy, [first, second])


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_whose_histories_are_not_on_disk_is_not_written(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no room for a line")

    checkpoints = Checkpointer(tmp_path / "checkpoints", tmp_path, CheckpointConfig(), sync_histories=fail)
    learner: Any = None  # is not looked at
    checkpoints.start_save(learner, TrainerState(1, 0, 0, (), {}, 0))
    checkpoints.close()
    assert (checkpoints.last_error, checkpoints.failures) == ("OSError: no room for a line", 1)
    assert not list((tmp_path / "checkpoints").glob("*/*"))
