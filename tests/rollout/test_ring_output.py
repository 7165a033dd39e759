"""The ring of a node: trajectories written into a full one, and its end with the job, not with a worker."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import NodeRing, Ring
from megatron_webrl.ring.segment import RingFull, segment_name, sweep_segments
from megatron_webrl.rollout import ring_output
from megatron_webrl.rollout.ring_output import TrajectoryWriter, open_node_ring
from tests.job_control import connect, control_service
from tests.trajectories import trajectory
from tests.waiting import eventually

LARGE = trajectory(prompt=40_000, response=10)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    monkeypatch.setattr(ring_output, "RING_POLL_SECONDS", 0.1)
    name = f"webrl-test-{secrets.token_hex(4)}"
    ring = Ring.create_or_attach(name, 2**20, name)
    with suppress(RingFull):
        while True:
            ring.write(encode_trajectory(LARGE), 0.0)
    yield ring
    ring.unlink()
    ring.close()


async def test_writing_into_a_full_ring_waits_for_space_and_leaves_the_threads_of_the_loop_free(ring: Ring) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    writer, records = TrajectoryWriter(ring, 30.0), ring.usage().records
    writing = [asyncio.create_task(writer.write([LARGE])) for _ in range(2)]
    await asyncio.sleep(0.3)  # more than one poll of the ring
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    assert writer.written_episodes == 0
    ring.acknowledge(ring.committed()[:1])
    await eventually(lambda: writer.written_episodes == 1)
    assert ring.usage().records == records
    writer.close()  # ends the wait; the trajectory does not count as written
    await asyncio.wait_for(asyncio.gather(*writing), 10)
    assert (writer.written_episodes, ring.usage().records) == (1, records)


async def test_a_ring_that_stays_full_is_an_error_after_the_limit(ring: Ring) -> None:
    with pytest.raises(RingFull):
        await asyncio.wait_for(TrajectoryWriter(ring, 0.3).write([LARGE]), 20)


@pytest.mark.parametrize("error", [None, JobEnded, RuntimeError])
def test_only_the_end_of_the_job_removes_the_ring(tmp_path: Path, error: type[Exception] | None) -> None:
    config, name = Config(), f"webrl-lifetime{os.getpid()}"
    config.run.name, config.ring.capacity_mib = name, 1
    ring, file = NodeRing(0, name, "job"), Path("/dev/shm", name)

    def serve() -> None:
        with suppress(JobEnded, RuntimeError), open_node_ring(config, control, ring, first_instance=False):
            if error is not None:
                raise error

    try:
        with control_service(tmp_path) as address:
            control = connect(address, "rollout-0")
            serve()  # a worker that was given up, or failed: the trainer still reads its records
            assert file.exists()
            control.end_job("finished")
            serve()
            assert not file.exists()
    finally:
        sweep_segments(name)


def test_without_an_answer_of_the_service_the_clean_end_of_a_role_removes_the_ring(tmp_path: Path) -> None:
    config, name = Config(), f"webrl-silent{os.getpid()}"
    config.run.name, config.ring.capacity_mib = name, 1
    with control_service(tmp_path) as address:
        control = ControlClient(address, "rollout-0", lost_seconds=0.2)
    try:
        for error, stays in ((RuntimeError, True), (JobEnded, False)):
            with suppress(error), open_node_ring(config, control, NodeRing(0, name, "job"), first_instance=False):
                raise error
            assert Path("/dev/shm", name).exists() == stays
    finally:
        sweep_segments(name)


def test_only_the_first_instance_of_a_worker_removes_the_records_of_an_earlier_job(tmp_path: Path) -> None:
    config = Config()
    config.run.name, config.ring.capacity_mib = f"swept{os.getpid()}", 1
    ring = NodeRing(0, segment_name(config.run.name, "node 0"), "job")
    with control_service(tmp_path) as address:
        control = connect(address, "rollout-0")
        with ring.create_or_attach(2**20) as written:
            written.write([b"record"], 0.0)
        for first_instance, kept in ((False, [b"record"]), (True, [])):  # no process uses the ring meanwhile
            with open_node_ring(config, control, ring, first_instance) as opened:
                assert [bytes(opened.read(number)) for number in opened.committed()] == kept
    sweep_segments(ring.name)
