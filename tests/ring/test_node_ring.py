"""The ring of a node: an earlier job's is not taken for this one's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from megatron_webrl.ring.errors import RingError
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.ring.segment import segment_name, segment_prefix, sweep_segments

SIZE = 2**16


@pytest.fixture
def run() -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    yield name
    sweep_segments(segment_prefix(name))


def place(run: str, job: str, node: int = 0) -> NodeRing:
    return NodeRing(node, segment_name(run, f"node {node}"), job)


def test_what_an_earlier_job_left_is_removed_and_its_records_are_never_read(run: str) -> None:
    with place(run, "first").create_or_attach(SIZE) as ring:
        ring.write([b"stale"], 1.0)
    with pytest.raises(RingError, match="is of another job, first"):
        place(run, "second").attach(0.2)
    assert place(run, "second").sweep_segments(run) == [place(run, "first").name]
    with place(run, "second").create_or_attach(SIZE) as ring, place(run, "second").attach(1.0) as reader:
        assert reader.committed() == []
        ring.unlink()


def test_a_worker_that_is_started_again_finds_the_ring_with_its_records(run: str) -> None:
    with place(run, "job").create_or_attach(SIZE) as ring:
        ring.write([b"finished"], 1.0)
    with place(run, "job").create_or_attach(SIZE) as again:
        assert len(again.committed()) == 1
        again.unlink()


def test_an_earlier_job_that_still_runs_on_the_node_is_named(run: str) -> None:
    with place(run, "first").create_or_attach(SIZE) as ring:
        assert place(run, "second").sweep_segments(run) == []
        with pytest.raises(RingError, match="exists with job id 'first'"):
            place(run, "second").create_or_attach(SIZE)
        ring.unlink()


def test_nodes_that_share_their_memory_have_rings_of_their_own(run: str) -> None:
    with place(run, "job", 0).create_or_attach(SIZE) as one, place(run, "job", 1).create_or_attach(SIZE) as two:
        one.write([b"here"], 1.0)
        assert (len(one.committed()), len(two.committed())) == (1, 0)
        one.unlink()
        two.unlink()
