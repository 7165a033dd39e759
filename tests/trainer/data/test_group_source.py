"""The group source over a real ring."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
    """Groups for an update, which have arrived."""
    taken = source.wait_for_groups(0, count, 5.0, go)
    assert taken is not None
    return taken


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


def test_each_record_is_read_and_decoded_once(ring: Ring, source: GroupSource, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    read = ring.read

    def counted(sequence: int, verify: bool = True) -> memoryview:
        numbers.append(sequence)
        return read(sequence, verify)

    monkeypatch.setattr(ring, "read", counted)
    put(ring, 0, [1.0, 0.0])
    put(ring, 1, [0.0, 1.0])
    taken = take(source, 2)
    assert [t.reward for group, _ in taken for t in group.trajectories] == [1.0, 0.0, 0.0, 1.0]
    assert numbers == [0, 1, 2, 3]


def test_a_group_waits_until_it_is_complete(ring: Ring, source: GroupSource):
    write(ring, trajectory(0, 1, group_size=2))
    put(ring, 7, [0.0, 0.0])
    with pytest.raises(GroupTimeout, match="0 of 1 arrived; episodes dropped: all_failed 2"):
        source.wait_for_groups(0, 1, 0.2, go)
    assert source.waiting_episodes() == 1
    write(ring, trajectory(0, 0, reward=1.0, group_size=2))
    taken = take(source, 1)
    assert [t.index for t in taken[0][0].trajectories] == [0, 1]


def test_a_group_that_misses_an_episode_for_too_long_is_dropped(ring: Ring, source: GroupSource):
    """The ring frees its space in order, and may have none for the missing one."""
    write(ring, trajectory(0, 1, group_size=2))
    limit = source.config.staleness_limit
    for version, waiting in ((0, 1), (limit, 1), (limit + 1, 0)):
        source.poll(version)
        assert source.waiting_episodes() == waiting
    source.poll(limit + 1)
    assert (ring.usage().records, source.accounting.dropped, source.closed_tickets) == (0, {"stale": 1}, {0})
    assert source.lost_tickets == 0


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


def test_untrainable_groups_are_dropped_by_reason_and_freed(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 1.0], version=5)
    put(ring, 1, [0.0, 0.0], outcome="engine_error")
    put(ring, 2, [1.0, 0.0], version=3)
    source.poll(version=5)
    put(ring, 3, [0.0, 0.0], version=5)
    source.poll(version=5)
    assert source.accounting.dropped == {"all_succeeded": 2, "all_failed": 2, "engine_error": 2, "stale": 2}
    assert source.dropped_tickets == 4
    assert ring.usage().records == 0
    assert source.waiting_episodes() == 0


def test_a_ready_group_that_becomes_stale_is_dropped(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 0.0], version=4)
    source.poll(version=5)
    assert source.waiting_episodes() == 2
    source.poll(version=6)
    assert source.accounting.dropped == {"stale": 2}


def test_a_group_with_masked_episodes_is_trained_only_if_the_rest_can_be(ring: Ring, source: GroupSource):
    dropped: Counter[str] = Counter()
    for ticket, (outcomes, reasons) in enumerate((
        (("success", "engine_error", "engine_error", "engine_error"), {"few_trainable": 1, "engine_error": 3}),
        (("success", "failure", "aborted", "browser_crashed"), {"aborted": 3, "browser_crashed": 1}),  # though fresh
    )):  # fmt: skip
        write(ring, *(trajectory(ticket, i, outcome=outcome, group_size=4) for i, outcome in enumerate(outcomes)))
        source.poll(0)
        dropped.update(reasons)
        assert source.accounting.dropped == dropped
        assert (source.dropped_tickets, source.waiting_episodes(), ring.usage().records) == (ticket + 1, 0, 0)
    outcomes = ("success", "failure", "browser_error", "browser_error")
    write(ring, *(trajectory(9, i, outcome=outcome, group_size=4) for i, outcome in enumerate(outcomes)))
    source.close_group(*take(source, 1)[0])
    assert source.accounting.trained == 2
    assert source.accounting.dropped == dropped + Counter(browser_error=2)


def test_a_group_of_different_tasks_is_dropped_by_name(ring: Ring, source: GroupSource):
    for index, task_id in enumerate(("a", "a", "b")):
        made = trajectory(0, index, reward=float(index == 0), group_size=3)
        write(ring, replace(made, task=replace(made.task, id=task_id)))
    source.poll(0)
    assert source.accounting.dropped == {"several_tasks": 3}
    assert ring.usage().records == 0


def test_the_mode_limits_the_staleness_of_a_group(ring: Ring):
    put(ring, 0, [1.0, 0.0], version=3)
    put(ring, 1, [1.0, 0.0], version=4)
    for mode, kept in (("async", 4), ("one_step_off", 2), ("sync", 0)):  # each frees what it drops
        config = Config()
        config.rollout.mode, config.rollout.max_staleness = mode, 2
        source = sourced(ring, config)
        source.poll(version=5)
        assert source.waiting_episodes() == kept, mode


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


def test_records_of_another_job_are_freed_and_not_counted(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 0.0], restart_epoch=1)
    source.poll(version=0)
    assert ring.usage().records == 0
    assert source.accounting.closed_episodes == source.waiting_episodes() == 0


def test_waiting_ends_when_the_caller_stops_it(ring: Ring, source: GroupSource):
    assert source.wait_for_groups(0, 1, 60.0, lambda ready: False) is None


def test_raft_keeps_groups_with_a_success_and_drops_those_without(ring: Ring, source: GroupSource):
    for number, name in enumerate(("raft", "raft_plus_plus"), 1):
        source.config.trainer.loss = loss_config(name)
        put(ring, 2 * number, [1.0, 1.0])
        put(ring, 2 * number + 1, [0.0, 0.0])
        source.poll(0)
        assert source.waiting_episodes() == 2 * number, name
        assert source.accounting.dropped == {"all_failed": 2 * number}, name


def test_group_rates_include_dropped_groups_and_reset(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 1.0])
    put(ring, 1, [0.0, 0.0])
    put(ring, 2, [1.0, 0.0])
    put(ring, 3, [0.0, 0.0])
    put(ring, 4, [0.0, 0.0], outcome="engine_error")
    source.poll(0)
    figures = source.pop_metrics()
    assert {name: figures.pop(f"group_rate/{name}") for name in GROUP_KINDS} == {
        "all_succeeded": 0.25, "all_failed": 0.5,
    }  # fmt: skip
    wanted = {
        "rollout_success_rate": 3 / 8, f"rollout_success_rate/{trajectory().task.environment}": 3 / 8,
        "rollout_episodes": 8, "finished_episodes": 10, "masked_rate/engine_error": 2 / 10,
    }  # fmt: skip
    assert {name: figures[name] for name in wanted} == wanted
    assert source.pop_metrics() == {}


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


def test_each_counted_episode_is_logged_with_its_disposition(ring: Ring, tmp_path: Path):
    log = EpisodeLog(tmp_path, 0)
    source = sourced(ring, episode_log=log)
    put(ring, 0, [1.0, 0.0])
    put(ring, 1, [0.0, 0.0])
    for group, sequences in take(source, 1):
        source.close_group(group, sequences)
    put(ring, 0, [1.0, 0.0])
    source.poll(4)
    found = [(line["ticket"], line["disposition"], line["version"]) for line in episodes.read_lines(tmp_path)]
    assert sorted(found) == [(0, "duplicate", 4)] * 2 + [(0, "trained", 0)] * 2 + [(1, "all_failed", 0)] * 2
    assert len(found) == source.accounting.closed_episodes


def test_on_complete_is_called_for_every_complete_group_and_before_its_drop(ring: Ring):
    seen: list[tuple[int, int]] = []
    source = sourced(ring, on_complete=lambda group: seen.append((group.ticket, source.dropped_tickets)))
    write(ring, *(trajectory(0, index, outcome="blocked") for index in range(2)))  # dropped as masked
    put(ring, 1, [1.0, 0.0])
    write(ring, trajectory(2, 0))  # not whole
    source.poll(0)
    assert seen == [(0, 0), (1, 1)]
    assert source.accounting.dropped == {"blocked": 2}


def test_a_teacher_alone_trains_groups_of_one_outcome_and_of_one_trainable_episode(ring: Ring) -> None:
    config = Config()
    config.trainer.distillation.coefficient, config.trainer.distillation.rewards = 1.0, False
    source = sourced(ring, config)
    put(ring, 0, [0.0, 0.0])
    put(ring, 1, [1.0, 1.0])
    write(ring, trajectory(2, 0), trajectory(2, 1, outcome="teacher_error"))
    put(ring, 3, [0.0, 0.0], outcome="teacher_error")
    taken = take(source, 3)
    assert [group.ticket for group, _ in taken] == [0, 1, 2]
    source.poll(0)
    assert source.accounting.dropped == {"teacher_error": 2}
