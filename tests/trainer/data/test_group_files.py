"""Groups in record files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.ring.segment import RecordError
from megatron_webrl.trainer.data import replay_buffer
from tests.trajectories import screenshot, trajectory
from tools.bench import recorded_groups


def test_groups_are_read_back_complete_and_in_order(tmp_path: Path) -> None:
    path = replay_buffer.group_file_path(tmp_path / "records", 7)
    made = [replace(trajectory(ticket, i, steps=2), images=(screenshot(i),)) for ticket in (9, 4) for i in (0, 1, 2)]
    replay_buffer.write_trajectories(path, made)
    assert list(path.parent.iterdir()) == [path]
    groups = recorded_groups.read_groups(path)
    assert [(g.ticket, [t.index for t in g.trajectories]) for g in groups] == [(9, [0, 1, 2]), (4, [0, 1, 2])]
    found = [t for group in groups for t in group.trajectories]
    for one, other in zip(found, made, strict=True):
        assert [bytes(image) for image in one.images] == list(other.images)
        assert np.array_equal(one.steps[1].logprobs, other.steps[1].logprobs)


def test_versions_are_read_from_file_names_and_other_files_are_ignored(tmp_path: Path) -> None:
    path = replay_buffer.group_file_path(tmp_path, 1234567)
    for each in (path, tmp_path / ".version-000003.records.here.17.0123abcd.writing"):
        each.touch()
    assert replay_buffer.list_group_files(tmp_path) == [(1234567, path)]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = replay_buffer.group_file_path(tmp_path, 0)
    replay_buffer.write_trajectories(path, [trajectory()])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordError, match=r"version-000000\.records is truncated"):
        recorded_groups.read_groups(path)
