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
from megatron_webrl.trainer.data.batching import training_samples
from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology
from megatron_webrl.types import Group
from tests.trajectories import screenshot, trajectory
from tools.bench import recorded_groups


class _OneNode:
    """An exchange of one rank, whose screenshots need no cache."""

    topology = NodeTopology((0,), 0)
    all_gather_trajectories: Any = staticmethod(list)
    all_gather_records: Any = staticmethod(lambda own: {0: own})

    def trajectories_to_store(self, groups: list[Group]) -> list[Any]:
        return [trajectory for group in groups for trajectory in group.trajectories]


def make(
    folder: Path, versions: int = 3, power: float = 0.0, every: int = 0, loss: Any = None, version: int = 0
) -> ReplayBuffer:
    config = Config()
    config.run.directory = str(folder)
    config.trainer.loss = loss or loss_config("raft", replay_versions=versions)
    config.trainer.checkpoint.every = every
    return ReplayBuffer(config, _OneNode(), version, decay_power=power)


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
    assert replay.batch([], 0) == []
    image = screenshot(0)
    batches = [
        [Group(g.ticket, tuple(replace(t, images=(image,)) for t in g.trajectories)) for g in batch(version)]
        for version in range(5)
    ]
    for version, groups in enumerate(batches):
        replay.add(groups, version)
    drawn = replay.batch([], 5)
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
    for ticket, _ in names(replay.batch([], 4)):
        counts[ticket // 1000] += 1
    assert counts[3] == 100
    assert counts[:3] == pytest.approx(np.array([25, 50, 75]), abs=18)  # over four standard deviations
    assert names(replay.batch([], 4)) == names(make(tmp_path, versions=4, power=1.0).batch([], 4))


def test_a_resumed_run_replays_stored_versions_and_overwrites_later_ones(tmp_path: Path) -> None:
    replay = make(tmp_path, every=1)
    for version in range(5):
        replay.add(batch(version), version)
    resumed = make(tmp_path, every=1)
    assert names(resumed.batch([], 4)) == [(version, i) for version in (1, 2, 3) for i in (0, 1)]
    resumed.add(batch(40, successes=1), 4)
    assert names(resumed.batch([], 5)) == [(2, 0), (2, 1), (3, 0), (3, 1), (40, 0)]


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
    assert names(replay.batch([], 2)) == [(ticket, i) for ticket in (1, 20, 30) for i in (0, 1)]
    assert [path.name for _, path in replay_buffer.list_group_files(replay.folder, 1, 2)] == [
        "version-000001.node-1.records"
    ]
    replay.add(batch(2), 1)
    assert names(replay.batch([], 2)) == [(2, 0), (2, 1)]


def test_a_missing_version_is_skipped_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    replay = make(tmp_path)
    replay.add(batch(1), 1)
    assert names(replay.batch([], 2)) == [(1, 0), (1, 1)]
    path = replay.folder / "version-000001.records"
    path.write_bytes(path.read_bytes()[:-5])
    for read in (lambda: replay.batch([], 2), lambda: recorded_groups.read_groups(path)):
        with pytest.raises(RecordError, match=r"version-000001\.records is truncated"):
            read()
    nothing = make(tmp_path / "none", versions=0)
    nothing.add(batch(0), 0)
    assert nothing.batch([], 1) == []
    assert not nothing.folder.exists()


INTO_FAILED = loss_config("grpo", replay_into_failed_groups=3)


def of_task(task: int, ticket: int, *rewards: float) -> Group:
    """A group of `ticket` on the task of another one; rewards between 0 and 1 are of failures that are paid in part."""
    made = [
        trajectory(ticket, i, reward=r, outcome="success" if r == 1 else "failure", group_size=len(rewards), seed=task)
        for i, r in enumerate(rewards)
    ]
    return Group(ticket, tuple(replace(each, task=trajectory(task).task) for each in made))


def test_a_group_that_failed_as_a_whole_is_completed_by_the_newest_success_of_its_task(tmp_path: Path) -> None:
    replay = make(tmp_path, loss=INTO_FAILED)
    first, second = of_task(1, 10, 0.0, 1.0, 1.0), of_task(1, 11, 1.0, 0.0, 0.0)
    replay.add([first, of_task(2, 12, 0.5, 0.0), of_task(3, 13, 1.0, 0.0)], 0)
    replay.add([second], 1)
    stored = recorded_groups.read_groups(replay_buffer.group_file_path(replay.folder, 0))
    assert [(each.ticket, len(each.trajectories)) for each in stored] == [(10, 1), (13, 1)]  # one of a group
    failed = [of_task(task, 20 + task, 0.0, 0.0, 0.0) for task in (1, 2, 3, 4)]
    mixed, unequal = of_task(1, 30, 1.0, 0.0), of_task(3, 31, 0.0, 0.5)
    assert [replay.has_success(f"miniwob/click-test/{task}", 2) for task in (1, 2, 3, 4)] == [True, False, True, False]
    batch = replay.batch([*failed, mixed, unequal], 2)
    assert [len(group.trajectories) for group in batch] == [4, 3, 4, 3, 2, 2]
    for group, success in ((batch[0], second.trajectories[0]), (batch[2], of_task(3, 13, 1.0, 0.0).trajectories[0])):
        *others, joined = group.trajectories
        assert (joined.ticket, joined.index, joined.outcome) == (group.ticket, 3, "success")
        assert {each.outcome for each in others} == {"failure"}
        assert np.array_equal(joined.steps[0].logprobs, success.steps[0].logprobs)  # of the policy that produced it
    # Version 0 is four updates ago, version 1 three.
    assert [len(group.trajectories) for group in replay.batch(failed, 4)] == [4, 3, 3, 3]
    assert not replay.has_success("miniwob/click-test/1", 5)


def test_the_baseline_of_a_completed_group_has_its_success(tmp_path: Path) -> None:
    replay, config = make(tmp_path, loss=INTO_FAILED), Config()
    replay.add([of_task(1, 10, 0.0, 1.0)], 0)
    samples = training_samples(replay.batch([of_task(1, 20, 0.0, 0.0, 0.0)], 1), config, 1)
    # One of four succeeds: mean 1/4, population deviation sqrt(3)/4.
    assert [sample.trajectory_id for sample in samples] == [(20, 0), (20, 1), (20, 2), (20, 3)]
    assert [sample.advantage for sample in samples] == pytest.approx([-(3**-0.5)] * 3 + [3**0.5], rel=1e-4)


def test_a_resumed_run_completes_groups_as_an_uninterrupted_one(tmp_path: Path) -> None:
    replay = make(tmp_path, loss=INTO_FAILED, every=2)
    for version in range(4):
        replay.add([of_task(version % 2, 10 + version, 1.0, 0.0)], version)
    failed = [of_task(task, 20 + task, 0.0, 0.0) for task in (0, 1)]
    for resumed_at, versions in ((2, [0, 1]), (3, [2, 1])):  # later files are of updates that are made again
        resumed = make(tmp_path, loss=INTO_FAILED, every=2, version=resumed_at)
        batch = resumed.batch(failed, resumed_at)
        for group, version in zip(batch, versions, strict=True):
            wanted = of_task(version % 2, 10 + version, 1.0, 0.0).trajectories[0]
            assert np.array_equal(group.trajectories[-1].steps[0].logprobs, wanted.steps[0].logprobs)
