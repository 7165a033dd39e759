"""The group source over a real ring."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from megatron_webrl.config import Config
from megatron_webrl.ring.record import encode
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.groups import GroupSource
from tests.trajectories import trajectory


@pytest.fixture
def ring() -> Iterator[Ring]:
    name = f"webrl-test-{secrets.token_hex(4)}"
    ring = Ring.create_or_attach(name, 2**20, name)
    yield ring
    ring.unlink()
    ring.close()


@pytest.fixture
def source(ring: Ring) -> GroupSource:
    config = Config()
    config.rollout.max_staleness = 1
    return GroupSource(ring, config, incarnation=0, accounting=Accounting())


def put(ring: Ring, ticket: int, rewards: list[float], **options) -> None:
    for index, reward in enumerate(rewards):
        ring.write(encode(trajectory(ticket, index, reward=reward, group_size=len(rewards), **options)), 1.0)


def go(ready: int) -> bool:
    return True


def test_groups_come_oldest_first_and_are_freed_when_closed(ring: Ring, source: GroupSource):
    put(ring, 3, [1.0, 0.0])
    put(ring, 1, [1.0, 0.0])
    put(ring, 2, [1.0, 0.0])
    taken = source.take(0, 2, 5.0, go)
    assert taken is not None
    assert [group.ticket for group, _ in taken] == [3, 1]
    assert ring.usage().records == 6
    for group, sequences in taken:
        source.close_group(group, sequences)
    assert ring.usage().records == 2
    assert source.accounting.trained == 4
    assert source.waiting() == 2
    assert source.closed == {1, 3}


def test_a_group_waits_until_it_is_whole(ring: Ring, source: GroupSource):
    ring.write(encode(trajectory(0, 1, group_size=2)), 1.0)
    put(ring, 7, [0.0, 0.0])
    with pytest.raises(TimeoutError, match="0 of 1 arrived; episodes dropped: zero_variance 2"):
        source.take(0, 1, 0.2, go)
    assert source.waiting() == 1
    ring.write(encode(trajectory(0, 0, reward=1.0, group_size=2)), 1.0)
    taken = source.take(0, 1, 5.0, go)
    assert taken is not None
    assert [t.index for t in taken[0][0].trajectories] == [0, 1]


def test_what_cannot_be_trained_is_dropped_by_name_and_freed(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 1.0], version=5)
    put(ring, 1, [0.0, 0.0], outcome="engine_error")
    put(ring, 2, [1.0, 0.0], version=3)
    source.poll(version=5)
    assert source.accounting.dropped == {"zero_variance": 2, "engine_error": 2, "stale": 2}
    assert source.dropped_tickets == 3
    assert ring.usage().records == 0
    assert source.waiting() == 0


def test_a_ready_group_that_grows_too_old_is_dropped(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 0.0], version=4)
    source.poll(version=5)
    assert source.waiting() == 2
    source.poll(version=6)
    assert source.accounting.dropped == {"stale": 2}


def test_a_masked_episode_of_a_trained_group_is_counted_by_its_own_name(ring: Ring, source: GroupSource):
    for index, (reward, outcome) in enumerate([(1.0, None), (0.0, None), (0.0, "browser_error")]):
        ring.write(encode(trajectory(0, index, reward=reward, outcome=outcome, group_size=3)), 1.0)
    taken = source.take(0, 1, 5.0, go)
    assert taken is not None
    source.close_group(*taken[0])
    assert source.accounting.trained == 2
    assert source.accounting.dropped == {"browser_error": 1}


def test_records_of_another_incarnation_are_freed_and_not_counted(ring: Ring, source: GroupSource):
    put(ring, 0, [1.0, 0.0], incarnation=1)
    source.poll(version=0)
    assert ring.usage().records == 0
    assert source.accounting.closed == source.waiting() == 0


def test_waiting_ends_when_the_caller_says_so(ring: Ring, source: GroupSource):
    assert source.take(0, 1, 60.0, lambda ready: False) is None


def test_raft_keeps_groups_with_a_success_and_drops_those_without(ring: Ring, source: GroupSource):
    source.config.trainer.loss.name = "raft"
    put(ring, 0, [1.0, 1.0])
    put(ring, 1, [0.0, 0.0])
    source.poll(0)
    assert source.waiting() == 2
    assert source.accounting.dropped == {"no_success": 2}


def test_what_a_second_life_of_a_worker_writes_again_is_a_duplicate(ring: Ring, source: GroupSource):
    ring.write(encode(trajectory(0, 0, reward=1.0, group_size=2, worker="rollout-0.1")), 1.0)
    put(ring, 0, [0.0, 0.0], worker="rollout-0.2")
    taken = source.take(0, 1, 5.0, go)
    assert taken is not None
    (group, sequences) = taken[0]
    assert [t.worker for t in group.trajectories] == ["rollout-0.1", "rollout-0.2"]
    put(ring, 0, [1.0, 0.0], worker="rollout-0.2")  # while the group is being trained
    source.poll(0)
    source.close_group(group, sequences)
    put(ring, 0, [1.0, 0.0], worker="rollout-0.3")  # and afterwards
    source.poll(1)
    assert source.accounting.trained == 2
    assert source.accounting.dropped == {"duplicate": 5}
    assert source.arrived == {"rollout-0.1": 1, "rollout-0.2": 4, "rollout-0.3": 2}
    assert sum(source.arrived.values()) == source.accounting.closed
    assert ring.usage().records == 0
    assert source.dropped_tickets == 0
