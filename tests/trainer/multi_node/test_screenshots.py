"""Stripped trajectories; sequences are assigned to nodes near their images, with balanced loads; the broadcast tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.trainer.data.packing import pack_sequences
from megatron_webrl.trainer.data.prefix_merging import MergedSequence
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology
from megatron_webrl.trainer.multi_node.screenshots import (
    BALANCE_TOLERANCE,
    IMAGE_KEY_BYTES,
    NodeSet,
    ReplicaNodes,
    assign_to_nodes,
    image_key,
    image_size,
    strip_images,
)
from tests.trainer.data.test_packing import COST, chain
from tests.trajectories import screenshot, trajectory

ONE, TWO, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
SHAPES = st.lists(
    st.tuples(st.integers(2, 500), st.integers(0, 2), st.sampled_from([1.0, 0.7])), min_size=1, max_size=50
)


def shot(number: int) -> bytes:
    return image_key(b"%d" % number * 100)


def sites(of_replica: Sequence[NodeSet], homes: Mapping[bytes, int]) -> ReplicaNodes:
    return ReplicaNodes(tuple(of_replica), lambda name, site: homes[name] in site)


def at_home(shapes: Sequence[tuple[int, int, float]], nodes: int) -> tuple[list[MergedSequence], dict[bytes, int]]:
    """Sequences of one screenshot each, which is on the given node."""
    chains = [chain(length, temperature, (shot(i),)) for i, (length, _, temperature) in enumerate(shapes)]
    return chains, {shot(i): node % nodes for i, (_, node, _) in enumerate(shapes)}


def test_balanced_sequences_stay_on_their_nodes_and_more_replicas_get_more() -> None:
    chains, homes = at_home([(100, 1 - i % 2, 1.0) for i in range(10)], 2)  # not in the order of the nodes
    assert assign_to_nodes(chains, [1.0] * 10, sites([ONE, TWO], homes)) == [[1, 3, 5, 7, 9], [0, 2, 4, 6, 8]]
    chains, homes = at_home([(100, 0, 1.0)] * 12, 2)
    assert list(map(len, assign_to_nodes(chains, [1.0] * 12, sites([ONE, TWO, TWO], homes)))) == [4, 8]


@given(SHAPES, st.integers(1, 3), st.integers(1, 3))
def test_each_sequence_is_assigned_once_and_loads_are_balanced(
    shapes: list[tuple[int, int, float]], first: int, second: int
) -> None:
    chains, homes = at_home(shapes, 2)
    costs = [COST.packed_flops(each) for each in chains]
    parts = assign_to_nodes(chains, costs, sites([ONE] * first + [TWO] * second, homes))
    assert sorted(i for part in parts for i in part) == list(range(len(chains)))
    share = (first, second)
    loads = [sum(costs[i] for i in part) / each for part, each in zip(parts, share, strict=True)]
    bound = (1 + BALANCE_TOLERANCE) * sum(costs) / sum(share) + max(costs) / min(share)
    assert max(loads) <= bound * (1 + 1e-9)


@given(
    SHAPES,
    st.integers(500, 2000),
    st.lists(st.sampled_from([ONE, TWO, BOTH]), min_size=1, max_size=5),
    st.integers(1, 2),
)
def test_packing_on_one_or_several_nodes_is_complete_within_the_limit_and_even(
    shapes: list[tuple[int, int, float]], limit: int, places: list[NodeSet], multiple: int
) -> None:
    chains, homes = at_home(shapes, 2)
    where = sites(places, homes)
    parts = pack_sequences(chains, COST, limit, len(places), multiple, where)
    assert len(parts) == len(places)
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % multiple == 0
    assert sorted(i for part in parts for row in part for i in row) == list(range(len(chains)))
    for row in (row for part in parts for row in part):
        assert sum(chains[i].length for i in row) <= limit
        assert len({chains[i].temperature for i in row}) <= 1
    assert parts == pack_sequences(chains, COST, limit, len(places), multiple, where)
    if len(set(places)) == 1:
        assert parts == pack_sequences(chains, COST, limit, len(places), multiple)


def test_a_stripped_trajectory_is_a_record_with_image_keys() -> None:
    whole = replace(trajectory(3, 1, steps=2), images=(screenshot(1), screenshot(2), screenshot(1)))
    record = b"".join(encode_trajectory(strip_images(whole)))
    assert len(record) < len(b"".join(encode_trajectory(whole))) - sum(map(len, whole.images)) + 3 * IMAGE_KEY_BYTES + 8
    found = decode_trajectory(record)
    assert [bytes(name) for name in found.images] == [image_key(image) for image in whole.images]
    assert [image_size(name) for name in found.images] == [len(image) for image in whole.images]
    assert found.images[0] == found.images[2] != found.images[1]
    again = replace(found, images=whole.images)
    assert b"".join(encode_trajectory(again)) == b"".join(encode_trajectory(whole))


def test_the_broadcast_tree_reaches_every_rank_once() -> None:
    of = (0, 1, 2, 0, 4, 3, 1, 4, 5, 0)
    reached = [0]
    for rank in range(len(of)):
        parent, children = NodeTopology(of, rank).broadcast_tree(rank)
        reached += children
        assert (parent is None) == (rank == 0)
        assert all(NodeTopology(of, other).broadcast_tree(other)[0] == rank for other in children)
    assert sorted(reached) == list(range(len(of)))
    assert NodeTopology(of, 3).node_leaders == (0, 1, 2, 4, 5, 8)
