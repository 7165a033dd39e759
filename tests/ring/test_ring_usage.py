"""Reading a ring's usage without attaching to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.ring.ring import Ring, RingUsage, read_ring_usage
from megatron_webrl.ring.segment import SHM_FOLDER, sweep_segments

NAME = f"webrl-test-usage-{os.getpid()}"


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create_or_attach(NAME, 64 * 4096, "job")
    yield made
    if (SHM_FOLDER / NAME).exists():
        made.unlink()
    made.close()


def test_the_usage_equals_that_of_an_attached_process(ring: Ring) -> None:
    assert read_ring_usage(NAME) == ring.usage() == RingUsage(0, 64 * 4096, 0, 0)
    for size in (10, 5000, 70_000):
        ring.write([bytes(size)], 1.0)
        assert read_ring_usage(NAME) == ring.usage()
    assert (read_ring_usage(NAME) or RingUsage(0, 0, 0, 0)).records == 3
    ring.acknowledge([0])
    before, usage = read_ring_usage(NAME), ring.usage()  # usage() frees acknowledged records
    assert before is not None
    assert before.records == usage.records == 2
    assert read_ring_usage(NAME) == usage


def test_the_usage_is_right_after_the_ring_has_wrapped(ring: Ring) -> None:
    for number in range(40):
        ring.write([bytes(30_000)], 1.0)
        if number > 3:
            ring.acknowledge([number - 4])
        assert ring.usage() == read_ring_usage(NAME)


def test_reading_the_usage_does_not_keep_a_ring_from_being_swept(ring: Ring) -> None:
    assert read_ring_usage(NAME) is not None
    ring.close()
    assert sweep_segments(NAME) == [NAME]
    assert read_ring_usage(NAME) is None


def test_files_that_are_not_rings_have_no_usage() -> None:
    path: Path = SHM_FOLDER / NAME
    for content in (b"", b"short", bytes(100_000), os.urandom(100_000)):
        path.write_bytes(content)
        try:
            assert read_ring_usage(NAME) is None
        finally:
            path.unlink()
    assert read_ring_usage("webrl-no-such-ring") is None
