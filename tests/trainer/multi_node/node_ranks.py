"""Processes of the multi-node tests. Two rings stand for two nodes; each rank is assigned one."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.types import Group
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trainer.learner_ranks import VERSION, make_config, make_groups, make_learner
from tests.trajectories import screenshot, trajectory


@dataclass(frozen=True)
class Layout:
    """Sizes of the trainer, and the node of each rank."""

    trainer: dict[str, int]
    nodes: tuple[int, ...]


PAIRS = {
    "dp2": Layout({"data_parallel": 2}, (0, 1)),
    "tp2 over nodes": Layout({"tensor_parallel": 2}, (0, 1)),
    "pp2 over nodes": Layout({"pipeline_parallel": 2}, (0, 1)),
}
FOURS = {
    "tp2 dp2": Layout({"tensor_parallel": 2, "data_parallel": 2}, (0, 0, 1, 1)),
    "tp2 over nodes, dp2": Layout({"tensor_parallel": 2, "data_parallel": 2}, (0, 1, 0, 1)),
}
HOMES = (0, 0, 1, 0, 0, 0)
"""The ring that each group is written to."""


def put(ring: Ring, groups: Sequence[Group]) -> None:
    for group in groups:
        for each in group.trajectories:
            ring.write(encode_trajectory(each), 10.0)


def fill(rings: Sequence[str], config: Config) -> None:
    """Write the groups of an update to two rings, unevenly."""
    for home, group in zip(HOMES, make_groups(config, len(HOMES)), strict=True):
        with Ring.attach(rings[home]) as ring:
            put(ring, [group])


# -- updates ------------------------------------------------------------------------------------------


def updates(rank: int, ranks: int, folder: str, model: str, rings: Sequence[str], layouts: dict[str, Layout]) -> None:
    """For each layout, an update with groups from two rings, and one with the same groups from memory."""
    torchvision_shim.install()
    platform = gloo.join(rank, ranks, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.trainer.parallel import parallel_sizes

    for name, layout in layouts.items():
        config = make_config(model)
        config.cluster.nodes, config.run.directory, config.trainer.image_workers = 2, folder, int(name == "dp2")
        for key, value in layout.trainer.items():
            setattr(config.trainer, key, value)
        process_groups.init_process_groups(parallel_sizes(config), seed=1)
        if rank == 0:
            fill(rings, config)
        torch.distributed.barrier()
        found = {"nodes": _update(config, platform, rings, layout), "one": _update_of_one(config, platform)}
        torch.save(found, f"{folder}/found-{name}-{rank}.pt")
        process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _update_of_one(config: Config, platform: Any) -> dict[str, Any]:
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer
    from tests.model.hf_export import hf_tensors

    learner = make_learner(config, platform)
    result = train_batch(
        learner, make_sequence_packer(config, platform), config, make_groups(config, len(HOMES)), VERSION
    )
    return {"result": result, "weights": {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}}


def _update(config: Config, platform: Any, names: Sequence[str], layout: Layout) -> dict[str, Any]:
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
    from megatron_webrl.trainer.data.group_source import GroupSource
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer
    from megatron_webrl.trainer.multi_node.exchange import make_exchange
    from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology
    from megatron_webrl.trainer.multi_node.screenshots import image_key
    from tests.model.hf_export import hf_tensors

    rank = torch.distributed.get_rank()
    learner = make_learner(config, platform)
    nodes = NodeTopology.all_gather(layout.nodes[rank], 2)
    rings = make_exchange(Ring.attach(names[nodes.node]), nodes, config)
    builder = make_sequence_packer(config, platform, image_cache=rings.image_cache)
    taken, source = None, None
    if rank == 0:
        source = GroupSource(rings, config, ResumePoint(), Accounting())
        taken = source.wait_for_groups(VERSION, len(HOMES), 60.0, lambda ready: True)
    groups = rings.broadcast_groups(taken)
    assert isinstance(groups, list)

    check = _compare_with_plan(builder, groups, config)
    fetched = {bytes(key) for key in rings.image_cache._images} - _local_keys(config, nodes.node, image_key)
    figures = rings.pop_metrics()

    result = train_batch(learner, builder, config, groups, VERSION)
    if source is not None:
        for group, numbers in taken or []:
            source.close_group(group, numbers)
    rings.finish_collecting()
    torch.distributed.barrier()  # leaders have freed the records
    left = Ring.attach(names[nodes.node]).usage().records
    builder.close()
    return {
        "result": result, "fetched": sorted(fetched), "figures": figures,
        "left": left, "weights": {name: tensor.clone() for name, tensor in hf_tensors(learner.models)},
        "groups": [(g.ticket, [t.index for t in g.trajectories]) for g in groups], **check,
    }  # fmt: skip


def _compare_with_plan(builder: Any, groups: Sequence[Group], config: Config) -> dict[str, Any]:
    """Compare this rank's training data with the plan and with the written data, byte for byte."""
    from megatron_webrl.trainer.data.batching import minibatches, training_samples
    from megatron_webrl.trainer.data.prefix_merging import unique_images
    from megatron_webrl.trainer.multi_node.screenshots import image_key

    originals = {image_key(i): i for g in make_groups(config, len(HOMES)) for t in g.trajectories for i in t.images}
    samples = training_samples(groups, config, VERSION)
    parts = minibatches(samples, config.trainer.minibatches, config.run.seed + VERSION)
    plans = [builder._plan(part, "constant", 10) for part in parts]
    built = builder.build_all(parts, "constant", 10)
    mine: list[bytes] = []
    same = True
    for plan, microbatches in zip(plans, built, strict=True):
        for planned, microbatch in zip(plan[builder.data_parallel_rank], microbatches, strict=True):
            inputs = microbatch.inputs
            tokens = torch.cat([torch.from_numpy(sequence.tokens) for sequence in planned.sequences])
            same &= torch.equal(inputs.tokens, tokens.long())
            unique = [bytes(key) for key, _ in unique_images(planned.sequences)]
            encoded = [unique[i] for i in inputs.local_images.tolist()]
            if encoded:
                expected = builder.processor.pixels([originals[key] for key in encoded])[0]
                same &= torch.equal(inputs.load_pixels(), expected)
            mine += encoded
    return {
        "same": same, "mine": sorted(set(mine)), "rows": [len(part) for plan in plans for part in plan],
        "tokens": [sum(s.length for each in part for s in each.sequences) for plan in plans for part in plan],
    }  # fmt: skip


def _local_keys(config: Config, node: int, key_of: Any) -> set[bytes]:
    groups = make_groups(config, len(HOMES))
    return {
        key_of(i)
        for home, group in zip(HOMES, groups, strict=True)
        for each in group.trajectories
        for i in each.images
        if home == node
    }


# -- groups alone -------------------------------------------------------------------------------------


def group(ticket: int, node: int, successes: int = 1, version: int = 0) -> Group:
    """Two episodes with a screenshot each, and one that all episodes of all nodes share."""
    common = screenshot(0)
    made = [trajectory(ticket, i, reward=float(i < successes), version=version) for i in range(2)]
    shots = [(screenshot(1000 + 10 * ticket + i), common) for i in range(2)]
    return Group(
        ticket,
        tuple(dataclasses.replace(t, images=s, worker=f"rollout-{node}.1") for t, s in zip(made, shots, strict=True)),
    )


class Member:
    """One rank without a model: its exchange, and on rank 0 the group source."""

    def __init__(
        self, rank: int, ranks: int, folder: str, names: Sequence[str], exchange_seconds: float = 60.0
    ) -> None:
        gloo.join(rank, ranks, folder)
        from megatron_webrl.trainer.accounting import Accounting
        from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
        from megatron_webrl.trainer.data.group_source import GroupSource
        from megatron_webrl.trainer.multi_node.exchange import RecordExchange
        from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, RankMessenger
        from megatron_webrl.trainer.multi_node.screenshots import ImageCache, ImageShard

        self.rank, self.config = rank, Config()
        self.config.run.directory, self.config.cluster.nodes = folder, len(names)
        self.ring = Ring.attach(names[rank * len(names) // ranks])
        nodes = NodeTopology.all_gather(rank * len(names) // ranks, len(names))
        wire = RankMessenger(nodes, exchange_seconds, 2 * exchange_seconds)
        cache, damaged = ImageCache(wire, ImageShard(rank, 0)), Path(folder, "damaged_records", f"node-{nodes.node}")
        self.rings = RecordExchange(self.ring, wire, cache, damaged)
        self.source = GroupSource(self.rings, self.config, ResumePoint(), Accounting()) if rank == 0 else None

    def share(self, count: int, version: int = 0) -> list[Group]:
        """The next groups of an update."""
        taken = None
        if self.source is not None:
            taken = self.source.wait_for_groups(version, count, 60.0, lambda ready: True)
        groups = self.rings.broadcast_groups(taken)
        assert isinstance(groups, list)
        self.numbers = {g.ticket: numbers for g, numbers in taken or []}
        return groups

    def close(self, groups: Sequence[Group]) -> None:
        """The update with these groups is made."""
        for each in groups if self.source is not None else ():
            self.source.close_group(each, self.numbers[each.ticket])


def late(rank: int, folder: str, names: Sequence[str]) -> None:
    """Node 1 has no groups until the first update is made, then more than node 0."""
    member = Member(rank, 2, folder, names)
    if rank == 0:
        put(member.ring, [group(t, 0) for t in (0, 1)])
    seen: list[list[Any]] = []
    for update in range(3):
        groups = member.share(2)
        seen.append([g.ticket for g in groups])
        assert [bytes(i) for g in groups for t in g.trajectories for i in t.images] == _names(groups)
        member.close(groups)
        if rank == 1 and update == 0:
            put(member.ring, [group(t, 1) for t in (2, 3, 4)])
        if rank == 0 and update == 0:
            put(member.ring, [group(5, 0)])
        torch.distributed.barrier()
    from megatron_webrl.trainer.multi_node.exchange import CollectInterrupt

    interrupts = [
        member.rings.broadcast_groups(why if rank == 0 else None)
        for why in (CollectInterrupt.NEW_ENGINES, CollectInterrupt.STOP)
    ]
    seen.append([why.name for why in interrupts if isinstance(why, CollectInterrupt)])
    member.rings.finish_collecting()
    torch.distributed.barrier()
    torch.save({"seen": seen, "left": member.ring.usage().records}, f"{folder}/late-{rank}.pt")
    torch.distributed.destroy_process_group()


def damaged(rank: int, folder: str, names: Sequence[str]) -> None:
    """Each node has a damaged record; the groups of others are trained."""
    from tests.ring.support import damage

    member = Member(rank, 2, folder, names)
    put(member.ring, [group(2 * t + rank, rank) for t in range(2)])
    damage(member.ring, member.ring.committed()[0], -1)  # of the first group
    groups = member.share(2)
    assert [g.ticket for g in groups] == [2, 3]
    member.close(groups)
    assert member.source is None or member.source.lost_tickets == 2
    member.rings.finish_collecting()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _names(groups: Sequence[Group]) -> list[bytes]:
    from megatron_webrl.trainer.multi_node.screenshots import image_key

    originals = [group(g.ticket, 0) for g in groups]
    return [image_key(i) for g in originals for t in g.trajectories for i in t.images]


def replayed(rank: int, folder: str, names: Sequence[str]) -> None:
    """Each node stores its successes, and all ranks replay those of both nodes."""
    member = Member(rank, 4, folder, names)
    from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer

    config, rings = member.config, member.rings
    config.trainer.loss = loss_config("raft", replay_versions=3)
    if rank in (0, 2):
        put(member.ring, [group(10 * rank + t, rank // 2) for t in range(1 + rank)])
    groups = member.share(4)
    replay = ReplayBuffer(config, rings, decay_power=0.0)
    replay.add(groups, 0)
    kept = rings.trajectories_to_store(groups) if rings.topology.is_node_leader else []
    stored = [(t.ticket, t.index, [bytes(i) for i in t.images]) for t in kept]  # before the records are freed
    member.close(groups)
    torch.distributed.barrier()
    if rank == 0:
        put(member.ring, [group(50, 0)])
    member.share(1, 1)
    drawn = replay.sample(1)
    wanted = {r: [bytes(i) for g in drawn for i in g.trajectories[0].images] for r in range(4)}
    rings.image_cache.fetch(wanted)
    found = {
        "drawn": sorted((g.ticket, g.trajectories[0].index) for g in drawn),
        "images": {
            g.ticket: [bytes(rings.image_cache.get(bytes(i))) for i in g.trajectories[0].images] for g in drawn
        },
        "stored": stored,
        "moved": rings.image_cache.transferred_bytes, "needed": rings.image_cache.needed_bytes,
    }  # fmt: skip
    rings.finish_collecting()
    torch.save(found, f"{folder}/replayed-{rank}.pt")
    torch.distributed.destroy_process_group()


def without(rank: int, folder: str, names: Sequence[str], how: str) -> None:
    """One rank is killed or stopped while others need it; the others write down their errors and times."""
    member = Member(rank, 4, folder, names, exchange_seconds=8.0)
    if rank == 0:
        put(member.ring, [group(0, 0)])
    member.share(1)
    torch.distributed.barrier()
    victim = 0 if how == "first" else 2
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    begun = time.monotonic()
    try:
        member.share(1)
    except RuntimeError as error:
        text = f"{time.monotonic() - begun}\n{type(error).__name__}\n{error}"
        Path(folder, f"error-{rank}").write_text(text)
        os._exit(0)


def undecided(rank: int, folder: str) -> None:
    """Both ranks claim to be on node 0 of 2."""
    gloo.join(rank, 2, folder)
    from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, NodeTopologyError

    try:
        NodeTopology.all_gather(0, 2)
    except NodeTopologyError as error:
        Path(folder, f"error-{rank}").write_text(str(error))
    torch.distributed.destroy_process_group()
