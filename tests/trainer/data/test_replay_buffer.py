"""The replay buffer of a trainer on one node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.trainer.data import replay_buffer
from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology
from megatron_webrl.types import Group
from tests.trajectories import screenshot, trajectory
from tools.bench import recorded_groups


class _OneNode:
    """An exchange of one rank, whose screenshots need no cache."""

    topology = NodeTopology((0,), 0)
    all_gather_trajectories: Any = staticmethod(list)

    def trajectories_to_store(self, groups: list[Group]) -> list[Any]:
        return [trajectory for group in groups for trajectory in group.trajectories]


def make(folder: Path, versions: int = 3, power: float = 0.0, every: int = 0) -> ReplayBuffer:
    config = Config()
    config.run.directory = str(folder)
    config.trainer.loss = loss_config("raft", replay_versions=versions)
    config.trainer.checkpoint.every = every
    return ReplayBuffer(config, _OneNode(), decay_power=power)


def batch(ticket: int, successes: int = 2) -> list[Group]:
    """One group with `successes` of four episodes that succeeded, and a fifth that is masked."""
    made = [trajectory(ticket, i, reward=float(i < successes), group_size=5, version=ticket) for i in range(4)]
    made.append(trajectory(ticket, 4, reward=1.0, outcome="browser_error", group_size=5))
    return [Group(ticket, tuple(made))]


def names(groups: list[Group]) -> list[tuple[int, int]]:
    assert all(len(group.trajectories) == 1 for group in groups)
    return sorted((group.ticket, group.trajectories[0].index) for group in groups)


def test_the_successes_of_the_last_versions_are_replayed_complete(tmp_path: Path) -> None:
    replay = make(tmp_path)
    assert replay.sample(0) == []
    image = screenshot(0)
    batches = [
        [Group(g.ticket, tuple(replace(t, images=(image,)) for t in g.trajectories)) for g in batch(version)]
        for version in range(5)
    ]
    for version, groups in enumerate(batches):
        replay.add(groups, version)
    drawn = replay.sample(5)
    assert names(drawn) == [(version, i) for version in (2, 3, 4) for i in (0, 1)]
    wanted = {t.index: t for t in batches[3][0].trajectories}
    for group in drawn:
        (found,) = group.trajectories
        if found.ticket == 3:
            original = wanted[found.index]
            assert found.images == original.images
            assert np.array_equal(found.steps[0].response_token_ids, original.steps[0].response_token_ids)


def test_older_successes_are_replayed_less_often(tmp_path: Path) -> None:
    replay = make(tmp_path, versions=4, power=1.0)
    counts = np.zeros(4)
    for version in range(4):
        replay.add([group for ticket in range(100) for group in batch(1000 * version + ticket, 1)], version)
    for ticket, _ in names(replay.sample(4)):
        counts[ticket // 1000] += 1
    assert counts[3] == 100
    assert counts[:3] == pytest.approx(np.array([25, 50, 75]), abs=18)  # over four standard deviations
    assert names(replay.sample(4)) == names(make(tmp_path, versions=4, power=1.0).sample(4))


def test_a_resumed_run_replays_stored_versions_and_overwrites_later_ones(tmp_path: Path) -> None:
    replay = make(tmp_path, every=1)
    for version in range(5):
        replay.add(batch(version), version)
    resumed = make(tmp_path, every=1)
    assert names(resumed.sample(4)) == [(version, i) for version in (1, 2, 3) for i in (0, 1)]
    resumed.add(batch(40, successes=1), 4)
    assert names(resumed.sample(5)) == [(2, 0), (2, 1), (3, 0), (3, 1), (40, 0)]


def test_files_stay_for_the_versions_that_a_resume_needs(tmp_path: Path) -> None:
    replay = make(tmp_path, versions=2, every=3)
    for version in range(12):
        replay.add(batch(version), version)
    left = sorted(path.name for path in replay.folder.iterdir())
    assert left == [f"version-{version:06d}.records" for version in range(4, 12)]


def test_files_of_removed_nodes_are_divided_and_overwritten(tmp_path: Path) -> None:
    replay = make(tmp_path)
    for node, ticket in ((0, 1), (1, 20), (2, 30)):
        path = replay_buffer.group_file_path(replay.folder, 1, node)
        replay_buffer.write_trajectories(
            path, [t for g in batch(ticket) for t in g.trajectories if t.trainable and t.reward]
        )
    assert names(replay.sample(2)) == [(ticket, i) for ticket in (1, 20, 30) for i in (0, 1)]
    assert [path.name for _, path in replay_buffer.list_group_files(replay.folder, 1, 2)] == [
        "version-000001.node-1.records"
    ]
    replay.add(batch(2), 1)
    assert names(replay.sample(2)) == [(2, 0), (2, 1)]


def test_a_missing_version_is_skipped_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    replay = make(tmp_path)
    replay.add(batch(1), 1)
    assert names(replay.sample(2)) == [(1, 0), (1, 1)]
    path = replay.folder / "version-000001.records"
    path.write_bytes(path.read_bytes()[:-5])
    for read in (lambda: replay.sample(2), lambda: recorded_groups.read_groups(path)):
        with pytest.raises(RecordError, match=r"version-000001\.records is truncated"):
            read()
    nothing = make(tmp_path / "none", versions=0)
    nothing.add(batch(0), 0)
    assert nothing.sample(1) == []
    assert not nothing.folder.exists()
