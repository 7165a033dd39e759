"""The ring of a node goes with the job, not with a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.ring.segment import sweep_segments
from megatron_webrl.rollout.ring_output import open_node_ring
from tests.job_control import connect, control_service

NAME = f"webrl-lifetime{os.getpid()}"


@pytest.fixture
def ring() -> Iterator[NodeRing]:
    yield NodeRing(0, NAME, "job")
    sweep_segments(NAME)


def small() -> Config:
    config = Config()
    config.run.name, config.ring.capacity_mib = NAME, 1
    return config


@pytest.mark.parametrize("error", [None, JobEnded, RuntimeError])
def test_only_the_end_of_the_job_removes_the_ring(
    tmp_path: Path, ring: NodeRing, error: type[Exception] | None
) -> None:
    file = Path("/dev/shm", NAME)

    def serve() -> None:
        try:
            with open_node_ring(small(), control, ring, first_instance=False):
                if error is not None:
                    raise error
        except (JobEnded, RuntimeError):
            assert error is not None

    with control_service(tmp_path) as address:
        control = connect(address, "rollout-0")
        serve()  # a worker that was given up, or failed: the trainer still reads its records
        assert file.exists()
        control.end_job("finished")
        serve()
        assert not file.exists()
