"""Stripped trajectories, and the broadcast tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology
from megatron_webrl.trainer.multi_node.screenshots import (
    IMAGE_KEY_BYTES,
    image_key,
    image_size,
    strip_images,
)
from tests.trajectories import screenshot, trajectory


def test_a_stripped_trajectory_is_a_record_with_image_keys() -> None:
    whole = replace(trajectory(3, 1, steps=2), images=(screenshot(1), screenshot(2), screenshot(1)))
    record = b"".join(encode_trajectory(strip_images(whole)))
    assert len(record) < len(b"".join(encode_trajectory(whole))) - sum(map(len, whole.images)) + 3 * IMAGE_KEY_BYTES + 8
    found = decode_trajectory(record)
    assert [bytes(name) for name in found.images] == [image_key(image) for image in whole.images]
    assert [image_size(name) for name in found.images] == [len(image) for image in whole.images]
    assert found.images[0] == found.images[2] != found.images[1]
    assert np.array_equal(found.steps[1].logprobs, whole.steps[1].logprobs)
    again = replace(found, images=whole.images)
    assert b"".join(encode_trajectory(again)) == b"".join(encode_trajectory(whole))


def test_the_broadcast_tree_reaches_every_rank_once() -> None:
    of = (0, 1, 2, 0, 4, 3, 1, 4, 5, 0)
    reached = [0]
    for rank in range(len(of)):
        nodes = NodeTopology(of, rank)
        parent, children = nodes.broadcast_tree(rank)
        reached += children
        assert (parent is None) == (rank == 0)
        for other in children:
            assert NodeTopology(of, other).broadcast_tree(other)[0] == rank
    assert sorted(reached) == list(range(len(of)))
    assert NodeTopology(of, 3).node_leaders == (0, 1, 2, 4, 5, 8)
