"""Rings of nodes and jobs are kept apart."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.ring.segment import RingError, segment_name, segment_prefix, sweep_segments

SIZE = 2**16


@pytest.fixture
def run() -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    yield name
    sweep_segments(segment_prefix(name))


def node_ring(run: str, job: str, node: int = 0) -> NodeRing:
    return NodeRing(node, segment_name(run, f"node {node}"), job)


def test_segments_of_an_earlier_job_are_removed_and_never_read(run: str) -> None:
    with node_ring(run, "first").create_or_attach(SIZE) as ring:
        ring.write([b"stale"], 1.0)
    with pytest.raises(RingError, match="is of another job, first"):
        node_ring(run, "second").attach(0.2)
    assert sweep_segments(segment_prefix(run)) == [node_ring(run, "first").name]
    with node_ring(run, "second").create_or_attach(SIZE) as ring, node_ring(run, "second").attach(1.0) as reader:
        assert reader.committed() == []
        ring.unlink()


def test_a_restarted_worker_finds_the_ring_with_its_records(run: str) -> None:
    with node_ring(run, "job").create_or_attach(SIZE) as ring:
        ring.write([b"finished"], 1.0)
    with node_ring(run, "job").create_or_attach(SIZE) as again:
        assert len(again.committed()) == 1
        again.unlink()


def test_a_running_earlier_job_is_named_in_the_error(run: str) -> None:
    with node_ring(run, "first").create_or_attach(SIZE) as ring:
        assert sweep_segments(segment_prefix(run)) == []
        with pytest.raises(RingError, match="exists with job id 'first'"):
            node_ring(run, "second").create_or_attach(SIZE)
        ring.unlink()


def test_nodes_with_common_shared_memory_have_separate_rings(run: str) -> None:
    with node_ring(run, "job", 0).create_or_attach(SIZE) as one, node_ring(run, "job", 1).create_or_attach(SIZE) as two:
        one.write([b"here"], 1.0)
        assert (len(one.committed()), len(two.committed())) == (1, 0)
        one.unlink()
        two.unlink()
