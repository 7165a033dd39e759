"""Writing trajectories into a full ring."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import RingFull
from megatron_webrl.rollout import ring_output
from megatron_webrl.rollout.ring_output import TrajectoryWriter
from tests.trajectories import trajectory

LARGE = trajectory(prompt=40_000, response=10)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    """A full ring of a few trajectories."""
    monkeypatch.setattr(ring_output, "RING_POLL_SECONDS", 0.1)
    name = f"webrl-test-{secrets.token_hex(4)}"
    ring = Ring.create_or_attach(name, 2**20, name)
    with suppress(RingFull):
        while True:
            ring.write(encode_trajectory(LARGE), 0.0)
    yield ring
    ring.unlink()
    ring.close()


def test_writing_into_a_full_ring_waits_for_space(ring: Ring) -> None:
    writer, records = TrajectoryWriter(ring, 30.0), ring.usage().records
    thread = threading.Thread(target=writer._write_one, args=(LARGE,))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert writer.written_episodes == 0
    ring.acknowledge(ring.committed()[:1])
    thread.join(10)
    assert not thread.is_alive()
    assert writer.written_episodes == 1
    assert ring.usage().records == records


def test_a_ring_that_stays_full_is_an_error_after_the_limit(ring: Ring) -> None:
    with pytest.raises(RingFull):
        TrajectoryWriter(ring, 0.3)._write_one(LARGE)


async def test_a_full_ring_leaves_the_threads_of_the_loop_free(ring: Ring) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    writer = TrajectoryWriter(ring, 30.0)
    writing = [asyncio.create_task(writer.write([LARGE])) for _ in range(2)]
    await asyncio.sleep(0.2)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    writer.close()
    await asyncio.wait_for(asyncio.gather(*writing), 10)
    assert writer.written_episodes == 0


def test_closing_ends_the_wait_and_the_trajectory_does_not_count_as_written(ring: Ring) -> None:
    writer = TrajectoryWriter(ring, 30.0)
    thread = threading.Thread(target=writer._write_one, args=(LARGE,))
    thread.start()
    writer.close()
    thread.join(10)
    assert not thread.is_alive()
    assert writer.written_episodes == 0
