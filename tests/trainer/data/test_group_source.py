"""The group source over a real ring."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.track import episodes
from megatron_webrl.track.episodes import EpisodeLog
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.data.group_source import GroupSource, GroupTimeout
from megatron_webrl.trainer.metrics.group_statistics import GROUP_KINDS
from megatron_webrl.types import Group, Trajectory
from tests.ring.support import damage
from tests.trajectories import trajectory


@pytest.fixture
def ring() -> Iterator[Ring]:
    name = f"webrl-test-{secrets.token_hex(4)}"
    ring = Ring.create_or_attach(name, 2**20, name)
    yield ring
    ring.unlink()
    ring.close()


def sourced(ring: Ring, config: Config | None = None, **options: Any) -> GroupSource:
    return GroupSource(ring, config or Config(), ResumePoint(), accounting=Accounting(), **options)


@pytest.fixture
def source(ring: Ring) -> GroupSource:
    config = Config()
    config.rollout.max_staleness = 1
    return sourced(ring, config)


def write(ring: Ring, *trajectories: Trajectory) -> None:
    for each in trajectories:
        ring.write(encode_trajectory(each), 1.0)


def put(ring: Ring, ticket: int, rewards: list[float], **options) -> None:
    write(ring, *(trajectory(ticket, i, reward=r, group_size=len(rewards), **options) for i, r in enumerate(rewards)))


def go(ready: int) -> bool:
    return True


def take(source: GroupSource, count: int) -> list[tuple[Group, list[int]]]:
    taken = source.wait_for_groups(0, count, 5.0, go)
    assert taken is not None
    return taken


def test_a_group_that_failed_as_a_whole_is_kept_if_its_task_has_a_success_to_replay(ring: Ring, source: GroupSource):
    asked = []

    def has_success(task_id: str, version: int) -> bool:
        asked.append((task_id, version))
        return task_id == "miniwob/click-test/2"

    put(ring, 1, [0.0, 0.0])
    put(ring, 2, [0.0, 0.0])
    put(ring, 3, [1.0, 1.0])
    put(ring, 4, [1.0, 0.0])
    taken = source.wait_for_groups(0, 2, 5.0, go, has_success=has_success) or []
    assert [group.ticket for group, _ in taken] == [2, 4]
    assert asked == [("miniwob/click-test/1", 0), ("miniwob/click-test/2", 0)]
    assert source.accounting.dropped == {"all_failed": 2, "all_succeeded": 2}


def test_of_ready_groups_those_with_the_oldest_tokens_come_first(ring: Ring, source: GroupSource):
    for ticket, version in ((1, 1), (2, 0), (3, 1), (4, 0)):
        put(ring, ticket, [1.0, 0.0], version=version)
    taken = source.wait_for_groups(1, 3, 5.0, go) or []
    assert [group.ticket for group, _ in taken] == [2, 4, 1]


def test_a_group_whose_old_tokens_are_masked_is_dropped_when_all_of_them_are(ring: Ring):
    config = Config()
    config.rollout.max_staleness, config.rollout.stale = 4, "mask"
    config.trainer.loss = loss_config(max_token_lag=2)
    source = sourced(ring, config)
    put(ring, 1, [1.0, 0.0], version=0)
    write(ring, *(trajectory(2, i, reward=i, group_size=2, version=5 * i) for i in range(2)))
    source.poll(2)
    assert source.accounting.dropped == {}
    source.poll(7)  # ticket 2 has tokens of versions 0 and 5
    assert source.accounting.dropped == {"stale": 2}
    assert [group.ticket for group, _ in source.wait_for_groups(7, 1, 5.0, go) or []] == [2]


def test_an_update_waits_for_groups_that_the_next_one_could_not_train(ring: Ring):
    config = Config()
    config.rollout.max_staleness, config.rollout.stale = 2, "wait"
    source = sourced(ring, config)
    source.issued |= {1: 0, 2: 0, 3: 1}
    for ticket in (2, 3):
        put(ring, ticket, [1.0, 0.0], version=1)
    assert len(source.wait_for_groups(1, 1, 5.0, go) or []) == 1  # ticket 1 can still be trained by the next update
    polls = itertools.count()

    def arrives(ready: int) -> bool:
        if next(polls) == 1:
            put(ring, 1, [1.0, 0.0], version=0)
        return True

    assert [group.ticket for group, _ in source.wait_for_groups(2, 1, 5.0, arrives) or []] == [1]
    assert next(polls) == 3
    put(ring, 4, [1.0, 1.0], version=2)
    source.issued[4] = 2
    assert [group.ticket for group, _ in source.wait_for_groups(3, 1, 5.0, go) or []] == [3]  # 4 is dropped
    assert source.accounting.dropped == {"all_succeeded": 2}


def test_groups_come_oldest_first_and_are_freed_when_closed(ring: Ring, source: GroupSource):
    put(ring, 3, [1.0, 0.0])
    put(ring, 1, [1.0, 0.0])
    put(ring, 2, [1.0, 0.0])
    taken = take(source, 2)
    assert [group.ticket for group, _ in taken] == [3, 1]
    assert ring.usage().records == 6
    for group, sequences in taken:
        source.close_group(group, sequences)
    assert ring.usage().records == 2
    assert source.accounting.trained == 4
    assert source.pop_metrics()["selection/trained/groups"] == 2
    assert source.waiting_episodes() == 2
    assert source.closed_tickets == {1, 3}


def test_a_damaged_record_costs_its_episode_and_neither_the_job_nor_the_room_of_its_group(
    ring: Ring, tmp_path: Path
) -> None:
    config = Config()
    config.run.directory = str(tmp_path)
    damaged: list[int] = []
    source = sourced(ring, config, on_damaged=lambda: damaged.append(1))
    put(ring, 0, [1.0, 0.0])
    put(ring, 1, [1.0, 0.0])
    for position in (0, 40, -1):  # header, description and last image of three records
        damage(ring, ring.write(encode_trajectory(trajectory(2, 0, group_size=2)), 1.0), position)
    damage(ring, 1, 50)
    taken = take(source, 1)
    assert [group.ticket for group, _ in taken] == [1]
    assert len(damaged) == 4
    assert (source.lost_tickets, source.waiting_episodes(), ring.usage().records) == (4, 1, 3)
    assert source.closed_tickets == set()  # open: a restart issues them again
    assert len(list((config.run_folder / "damaged_records").iterdir())) == 4
    limit = config.rollout.max_staleness
    source.poll(limit)
    assert source.waiting_episodes() == 1
    source.poll(limit + 1)  # what is left of group 0 could not be trained any more, and blocks the ring
    source.close_group(*taken[0])
    assert (source.lost_tickets, source.waiting_episodes(), ring.usage().records) == (3, 0, 0)
    assert source.closed_tickets == {0, 1}
    assert source.accounting.dropped == {"stale": 1}


def test_a_group_waits_until_it_is_complete(ring: Ring, source: GroupSource):
    write(ring, trajectory(0, 1, group_size=2))
    put(ring, 7, [0.0, 0.0])
    with pytest.raises(GroupTimeout, match="0 of 1 arrived; episodes dropped: all_failed 2"):
        source.wait_for_groups(0, 1, 0.2, go)
    assert source.waiting_episodes() == 1
    assert source.wait_for_groups(0, 1, 60.0, lambda ready: False) is None  # the caller stops it
    write(ring, trajectory(0, 0, reward=1.0, group_size=2))
    taken = take(source, 1)
    assert [t.index for t in taken[0][0].trajectories] == [0, 1]


def test_time_without_an_engine_does_not_count_up_to_the_limit_of_a_start(ring: Ring, source: GroupSource):
    served = time.monotonic() + 0.6
    with pytest.raises(GroupTimeout, match="0 of 1 arrived"):
        source.wait_for_groups(0, 1, 0.3, go, lambda: time.monotonic() > served)
    assert time.monotonic() > served + 0.2
    source.config.run.startup_timeout_seconds = 0.5
    started = time.monotonic()
    with pytest.raises(GroupTimeout, match="waited"):
        source.wait_for_groups(0, 1, 0.2, go, lambda: False)
    assert 0.6 < time.monotonic() - started < 30


def test_a_ready_group_that_becomes_stale_is_dropped(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 0.0], version=4)
    source.poll(version=5)
    assert source.waiting_episodes() == 2
    source.poll(version=6)
    assert source.accounting.dropped == {"stale": 2}


MIXED, FAILED, LOST = ("success", "failure"), ("failure", "failure"), ("teacher_error", "teacher_error")
TEACHER = {"distillation": DistillationConfig(coefficient=1.0, rewards=False)}
# Outcomes of a group at version 5, of tokens of a version, mode, settings of the trainer, and the reasons of its drop.
GROUPS: list[tuple[tuple[str, ...], int, str, dict[str, Any], dict[str, int]]] = [
    (MIXED, 5, "async", {}, {}),
    (("success", "success"), 5, "async", {}, {"all_succeeded": 2}),
    (FAILED, 5, "async", {}, {"all_failed": 2}),
    (("engine_error", "engine_error"), 5, "async", {}, {"engine_error": 2}),
    (("success", "engine_error", "engine_error"), 5, "async", {}, {"few_trainable": 1, "engine_error": 2}),
    (("success", "failure", "aborted", "browser_crashed"), 5, "async", {}, {"aborted": 3, "browser_crashed": 1}),
    (("success", "failure", "browser_error"), 5, "async", {}, {}),
    (MIXED, 3, "async", {}, {}),
    (MIXED, 2, "async", {}, {"stale": 2}),
    (MIXED, 4, "one_step_off", {}, {}),
    (MIXED, 3, "one_step_off", {}, {"stale": 2}),
    (MIXED, 4, "sync", {}, {"stale": 2}),
    *((("success", "success"), 5, "async", {"loss": loss_config(name)}, {}) for name in ("raft", "raft_plus_plus")),
    *((FAILED, 5, "async", {"loss": loss_config(name)}, {"all_failed": 2}) for name in ("raft", "raft_plus_plus")),
    (FAILED, 5, "async", TEACHER, {}),
    (("failure", "teacher_error"), 5, "async", TEACHER, {}),
    (LOST, 5, "async", TEACHER, {"teacher_error": 2}),
]


def test_groups_that_cannot_be_trained_are_dropped_by_reason_and_freed(ring: Ring):
    for outcomes, version, mode, settings, dropped in GROUPS:
        case, config = (outcomes, version, mode, settings), Config()
        config.rollout.mode, config.rollout.max_staleness = mode, 2
        for name, value in settings.items():
            setattr(config.trainer, name, value)
        source, size = sourced(ring, config), len(outcomes)
        made = (trajectory(0, i, outcome=o, group_size=size, version=version) for i, o in enumerate(outcomes))
        write(ring, *(replace(each, reward=float(each.outcome == "success")) for each in made))
        source.poll(5)
        assert source.accounting.dropped == dropped, case
        left = 0 if dropped else size
        assert (source.dropped_tickets, source.waiting_episodes(), ring.usage().records) == (left == 0, left, left), (
            case
        )
        if not dropped:
            (taken,) = source.wait_for_groups(5, 1, 5.0, go) or ()
            source.close_group(*taken)
            masked = Counter(each for each in outcomes if each not in MIXED)
            assert (source.accounting.dropped, source.accounting.trained) == (masked, size - masked.total()), case
    source = sourced(ring)
    for index, task_id in enumerate(("a", "a", "b")):
        each = trajectory(0, index, reward=float(index == 0), group_size=3)
        write(ring, replace(each, task=replace(each.task, id=task_id)))
    put(ring, 1, [1.0, 0.0], restart_epoch=1)  # of another job: not counted
    source.poll(0)
    assert source.accounting.dropped == {"several_tasks": 3}
    assert (source.waiting_episodes(), ring.usage().records) == (0, 0)


def test_wasted_tokens_are_counted_by_reason(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 1.0], response=10)
    mixed = [
        replace(trajectory(1, 0, reward=1.0, response=20, group_size=3), tries=2, discarded_tokens=4),
        trajectory(1, 1, response=10, group_size=3),
        trajectory(1, 2, outcome="engine_error", response=6, group_size=3),
    ]
    write(ring, *mixed)
    for group, sequences in take(source, 1):
        source.close_group(group, sequences)
    assert source.accounting.tokens_trained == 30
    assert source.accounting.tokens_dropped == {"all_succeeded": 20, "engine_error": 6, "retried": 4}
    waste = source.accounting.wasted_token_shares()
    assert waste["wasted_token_fraction"] == pytest.approx(0.5)
    assert waste["wasted_token_fraction/retried"] == pytest.approx(4 / 60)
    assert Accounting.from_state_dict(source.accounting.state_dict()) == source.accounting
    assert source.accounting.summary(5, 0)["tokens"]["trained"] == 30
    assert source.accounting.summary(5, 0)["matches"]


def test_outcomes_decide_whether_a_group_is_trained_and_penalties_do_not(ring: Ring):
    config = Config()
    config.trainer.reward.length_penalty, config.trainer.reward.length_window = 1.0, 4
    config.rollout.max_new_tokens = 8
    source = sourced(ring, config)
    write(ring, *(trajectory(0, i, response=response) for i, response in enumerate((4, 6))))  # both fail, one at length
    # a success that is worth a failure
    write(ring, trajectory(1, 0, response=4), trajectory(1, 1, reward=1.0, response=8))
    source.poll(0)
    assert source.waiting_episodes() == 2
    assert source.accounting.dropped == {"all_failed": 2}
    figures = source.pop_metrics()
    assert {name: figures[f"group_rate/{name}"] for name in GROUP_KINDS} == {"all_succeeded": 0.0, "all_failed": 0.5}
    assert not [name for name in source.pop_metrics() if not name.startswith("selection/all_failed/")]


def test_records_written_again_by_a_restarted_worker_are_duplicates(ring: Ring, source: GroupSource):
    write(ring, trajectory(0, 0, reward=1.0, group_size=2, worker="rollout-0.1"))
    put(ring, 0, [0.0, 0.0], worker="rollout-0.2")
    taken = take(source, 1)
    (group, sequences) = taken[0]
    assert [t.worker for t in group.trajectories] == ["rollout-0.1", "rollout-0.2"]
    put(ring, 0, [1.0, 0.0], worker="rollout-0.2")  # while the group is being trained
    source.poll(0)
    source.close_group(group, sequences)
    put(ring, 0, [1.0, 0.0], worker="rollout-0.3")  # and afterwards
    source.poll(1)
    assert source.accounting.trained == 2
    assert source.accounting.dropped == {"duplicate": 5}
    assert source.episodes_by_worker == {"rollout-0.1": 1, "rollout-0.2": 4, "rollout-0.3": 2}
    assert sum(source.episodes_by_worker.values()) == source.accounting.closed_episodes
    assert ring.usage().records == 0
    assert source.dropped_tickets == 0


def test_a_group_that_was_closed_before_a_restart_is_trained_once(ring: Ring):
    resumed = ResumePoint(restart_epoch=1, version=2, reissued_tickets=(1,), next_ticket=3)
    source = GroupSource(ring, Config(), resumed, accounting=Accounting())
    for ticket in (0, 1, 2, 3):
        put(ring, ticket, [1.0, 0.0], version=2, restart_epoch=1)
    assert [group.ticket for group, _ in source.wait_for_groups(2, 2, 5.0, go) or ()] == [1, 3]
    assert source.accounting.dropped == {"duplicate": 4}


def test_each_counted_episode_is_logged_and_each_complete_group_reported(ring: Ring, tmp_path: Path):
    log = EpisodeLog(tmp_path, 0)
    seen: list[tuple[int, int]] = []  # complete groups, before their drop
    source = sourced(
        ring, episode_log=log, on_complete=lambda group: seen.append((group.ticket, source.dropped_tickets))
    )
    put(ring, 0, [1.0, 0.0])
    put(ring, 1, [0.0, 0.0])
    for group, sequences in take(source, 1):
        source.close_group(group, sequences)
    write(ring, trajectory(2, 0))  # not whole
    put(ring, 0, [1.0, 0.0])
    source.poll(4)
    found = [(line["ticket"], line["disposition"], line["version"]) for line in episodes.read_lines(tmp_path)]
    assert sorted(found) == [(0, "duplicate", 4)] * 2 + [(0, "trained", 0)] * 2 + [(1, "all_failed", 0)] * 2
    assert len(found) == source.accounting.closed_episodes
    assert seen == [(0, 0), (1, 0)]
