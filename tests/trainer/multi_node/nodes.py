"""Two rings that stand for two nodes, and trainer ranks without a model, each of which is assigned one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.data.group_source import GroupSource
from megatron_webrl.trainer.multi_node.exchange import RecordExchange
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, RankMessenger
from megatron_webrl.trainer.multi_node.screenshots import ImageCache, ImageShard
from megatron_webrl.types import Group
from tests.trajectories import screenshot, trajectory


def put(ring: Ring, groups: Sequence[Group]) -> None:
    for group in groups:
        for each in group.trajectories:
            ring.write(encode_trajectory(each), 10.0)


def group(ticket: int, node: int, successes: int = 1, version: int = 0) -> Group:
    """Two episodes with a screenshot each, and one that all episodes of all nodes share."""
    made = [trajectory(ticket, i, reward=float(i < successes), version=version) for i in range(2)]
    shots = [(screenshot(1000 + 10 * ticket + i), screenshot(0)) for i in range(2)]
    return Group(
        ticket, tuple(replace(t, images=s, worker=f"rollout-{node}.1") for t, s in zip(made, shots, strict=True))
    )


def one_node_exchange(ring: Ring) -> RecordExchange:
    """The exchange of a trainer of one rank, whose process group exists."""
    messenger = RankMessenger(NodeTopology((0,), 0), 60.0, 60.0)
    return RecordExchange(ring, messenger, ImageCache(messenger, ImageShard(0, 0)), Path())


class Member:
    """One rank without a model: its exchange, and on rank 0 the group source."""

    def __init__(self, folder: Path, names: Sequence[str], exchange_seconds: float = 60.0) -> None:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.config = Config()
        self.config.run.directory, self.config.cluster.nodes = str(folder), len(names)
        node = rank * len(names) // ranks
        self.ring, nodes = Ring.attach(names[node]), NodeTopology.all_gather(node, len(names))
        messenger = RankMessenger(nodes, exchange_seconds, 2 * exchange_seconds)
        cache, damaged = ImageCache(messenger, ImageShard(rank, 0)), folder / "damaged_records" / f"node-{node}"
        self.rings = RecordExchange(self.ring, messenger, cache, damaged)
        self.source = GroupSource(self.rings, self.config, ResumePoint(), Accounting()) if rank == 0 else None

    def share(self, count: int, version: int = 0) -> list[Group]:
        taken = None
        if self.source is not None:
            taken = self.source.wait_for_groups(version, count, 60.0, lambda ready: True)
        groups = self.rings.broadcast_groups(taken)
        assert isinstance(groups, list)
        self.numbers = {g.ticket: numbers for g, numbers in taken or []}
        return groups

    def close(self, groups: Sequence[Group]) -> None:
        for each in groups if self.source is not None else ():
            self.source.close_group(each, self.numbers[each.ticket])
