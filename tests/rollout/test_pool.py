"""How the pool hands trajectories over when the ring has no room."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.errors import RingFull
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout import pool as pools
from megatron_webrl.rollout.pool import RolloutPool
from tests.trajectories import trajectory

LARGE = trajectory(prompt=40_000, response=10)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    """A ring with room for a few trajectories, and full."""
    monkeypatch.setattr(pools, "RING_POLL_SECONDS", 0.1)
    name = f"webrl-test-{secrets.token_hex(4)}"
    ring = Ring.create_or_attach(name, 2**20, name)
    with suppress(RingFull):
        while True:
            ring.write(encode_trajectory(LARGE), 0.0)
    yield ring
    ring.unlink()
    ring.close()


def make_pool(ring: Ring, seconds: float) -> RolloutPool:
    config = Config()
    config.ring.write_timeout_seconds = seconds
    unused: Any = None
    return RolloutPool(
        config,
        unused,
        ring,
        engine=unused,
        episode_runner=unused,
        weight_client=unused,
        evaluator=unused,
        instance_id="rollout-0.1",
    )


def test_a_full_ring_holds_a_trajectory_back_until_there_is_room(ring: Ring):
    pool, records = make_pool(ring, 30.0), ring.usage().records
    thread = threading.Thread(target=pool._write_one, args=(LARGE,))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert pool.written_episodes == 0
    ring.acknowledge(ring.committed()[:1])
    thread.join(10)
    assert not thread.is_alive()
    assert pool.written_episodes == 1
    assert ring.usage().records == records


def test_a_ring_that_stays_full_is_an_error_after_its_limit(ring: Ring):
    with pytest.raises(RingFull):
        make_pool(ring, 0.3)._write_one(LARGE)


def test_at_the_end_of_the_job_what_found_no_room_is_not_counted_as_written(ring: Ring):
    pool = make_pool(ring, 30.0)
    thread = threading.Thread(target=pool._write_one, args=(LARGE,))
    thread.start()
    pool._ended = True
    thread.join(10)
    assert not thread.is_alive()
    assert pool.written_episodes == 0
