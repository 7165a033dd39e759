"""What the gloo processes of the tests of several nodes do. Two nodes are two rings; ranks are told which is theirs."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_webrl import compat
from megatron_webrl.config import Config
from megatron_webrl.ring.record import encode
from megatron_webrl.ring.ring import Ring
from megatron_webrl.types import Group
from tests import gloo
from tests.trainer.learner_ranks import VERSION, make_config, make_groups
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
"""Which ring each of the groups is written to."""


def put(ring: Ring, groups: Sequence[Group]) -> None:
    for group in groups:
        for each in group.trajectories:
            ring.write(encode(each), 10.0)


def fill(rings: Sequence[str], config: Config) -> None:
    """Write the groups of an update to two rings, unevenly."""
    for home, group in zip(HOMES, make_groups(config, len(HOMES)), strict=True):
        with Ring.attach(rings[home]) as ring:
            put(ring, [group])


# -- updates ------------------------------------------------------------------------------------------


def updates(rank: int, ranks: int, folder: str, model: str, rings: Sequence[str], layouts: dict[str, Layout]) -> None:
    """Each layout makes an update with the groups of two rings, and one with the same groups from memory."""
    compat.install()
    platform = gloo.join(rank, ranks, folder)
    from megatron_webrl.model import groups
    from megatron_webrl.trainer.parallel import sizes

    for name, layout in layouts.items():
        config = make_config(model)
        config.cluster.nodes, config.run.directory, config.trainer.pixel_workers = 2, folder, int(name == "dp2")
        for key, value in layout.trainer.items():
            setattr(config.trainer, key, value)
        groups.form(sizes(config), seed=1)
        if rank == 0:
            fill(rings, config)
        torch.distributed.barrier()
        found = {"nodes": _update(config, platform, rings, layout), "one": _update_of_one(config, platform)}
        torch.save(found, f"{folder}/found-{name}-{rank}.pt")
        groups.dissolve()
    torch.distributed.destroy_process_group()


def _update_of_one(config: Config, platform: Any) -> dict[str, Any]:
    from megatron_webrl.model.export import hf_tensors
    from megatron_webrl.trainer.build import make_builder, make_learner
    from megatron_webrl.trainer.loop import update

    learner = make_learner(config, platform)
    result = update(learner, make_builder(config, platform), config, make_groups(config, len(HOMES)), VERSION)
    return {"result": result, "weights": {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}}


def _update(config: Config, platform: Any, names: Sequence[str], layout: Layout) -> dict[str, Any]:
    from megatron_webrl.model.export import hf_tensors
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.batching import minibatches, training_samples
    from megatron_webrl.trainer.beginning import Beginning
    from megatron_webrl.trainer.build import make_builder, make_learner, with_pixels_ahead
    from megatron_webrl.trainer.cost import distinct_images
    from megatron_webrl.trainer.groups import GroupSource
    from megatron_webrl.trainer.loop import update
    from megatron_webrl.trainer.node_rings import NodeRings, join_rings
    from megatron_webrl.trainer.nodes import Nodes
    from megatron_webrl.trainer.outline import name_of

    rank = torch.distributed.get_rank()
    learner = make_learner(config, platform)
    builder = with_pixels_ahead(make_builder(config, platform), config, rank)
    nodes = Nodes.meet(layout.nodes[rank], 2)
    rings = join_rings(Ring.attach(names[nodes.node]), nodes, config, builder)
    assert isinstance(rings, NodeRings)
    builder, taken, source = replace(builder, shelf=rings.shelf), None, None
    if rank == 0:
        source = GroupSource(rings.records, config, Beginning.first(), Accounting())
        taken = source.take(VERSION, len(HOMES), 60.0, lambda ready: True)
    groups = rings.share(taken)
    assert isinstance(groups, list)

    # What this rank trains on, against what the plan says and what was written, byte for byte.
    originals = {name_of(i): i for g in make_groups(config, len(HOMES)) for t in g.trajectories for i in t.images}
    parts = minibatches(
        training_samples(groups, config, VERSION), config.trainer.minibatches, config.run.seed + VERSION
    )
    plans = [builder._plan(part, "constant", 10) for part in parts]
    built = builder.build_all(parts, "constant", 10)
    mine: list[bytes] = []
    same = True
    for plan, rows in zip(plans, built, strict=True):
        for planned, row in zip(plan[builder.replica], rows, strict=True):
            tokens = torch.cat([torch.from_numpy(chain.tokens) for chain in planned.chains])
            same &= torch.equal(row.row.tokens, tokens.long())
            unique = [bytes(name) for name, _ in distinct_images(planned.chains)]
            encoded = [unique[i] for i in row.row.encoded.tolist()]
            if encoded:
                expected = builder.processor.pixels([originals[name] for name in encoded])[0]
                same &= torch.equal(row.row.patches(), expected)
            mine += encoded
    brought = {bytes(name) for name in rings.shelf._held} - _at_home(config, nodes.node, name_of)
    figures = rings.take_figures()

    result = update(learner, builder, config, groups, VERSION)
    if source is not None:
        for group, numbers in taken or []:
            source.close_group(group, numbers)
    rings.end()
    torch.distributed.barrier()  # readers have freed what the first rank told them
    left = Ring.attach(names[nodes.node]).usage().records
    builder.close()
    return {
        "result": result, "same": same, "mine": sorted(set(mine)), "brought": sorted(brought), "figures": figures,
        "left": left, "weights": {name: tensor.clone() for name, tensor in hf_tensors(learner.models)},
        "rows": [len(part) for plan in plans for part in plan],
        "tokens": [sum(c.length for row in part for c in row.chains) for plan in plans for part in plan],
        "groups": [(g.ticket, [t.index for t in g.trajectories]) for g in groups],
    }  # fmt: skip


def _at_home(config: Config, node: int, name_of: Any) -> set[bytes]:
    groups = make_groups(config, len(HOMES))
    return {
        name_of(i)
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
    """One rank on a node of its own, without a model: its rings, and at the first rank the source of groups."""

    def __init__(
        self, rank: int, ranks: int, folder: str, names: Sequence[str], exchange_seconds: float = 60.0
    ) -> None:
        gloo.join(rank, ranks, folder)
        from megatron_webrl.trainer.accounting import Accounting
        from megatron_webrl.trainer.beginning import Beginning
        from megatron_webrl.trainer.groups import GroupSource
        from megatron_webrl.trainer.node_rings import NodeRings
        from megatron_webrl.trainer.nodes import Nodes
        from megatron_webrl.trainer.shelf import Seat, Shelf
        from megatron_webrl.trainer.wire import Wire

        self.rank, self.config = rank, Config()
        self.config.run.directory, self.config.cluster.nodes = folder, len(names)
        self.ring = Ring.attach(names[rank * len(names) // ranks])
        nodes = Nodes.meet(rank * len(names) // ranks, len(names))
        wire = Wire(nodes, exchange_seconds, 2 * exchange_seconds)
        self.rings = NodeRings(self.ring, wire, Shelf(wire, Seat(rank, 0)))
        self.source = (
            GroupSource(self.rings.records, self.config, Beginning.first(), Accounting()) if rank == 0 else None
        )

    def share(self, count: int, version: int = 0) -> list[Group]:
        """The next groups, closed at once at the first rank."""
        taken = None
        if self.source is not None:
            taken = self.source.take(version, count, 60.0, lambda ready: True)
        groups = self.rings.share(taken)
        assert isinstance(groups, list)
        self.numbers = {g.ticket: numbers for g, numbers in taken or []}
        return groups

    def close(self, groups: Sequence[Group]) -> None:
        """The update with these groups is made."""
        for each in groups if self.source is not None else ():
            self.source.close_group(each, self.numbers[each.ticket])


def late(rank: int, folder: str, names: Sequence[str]) -> None:
    """Node 1 brings nothing until the first update is made, then more than node 0."""
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
    from megatron_webrl.trainer.sharing import Interruption

    told = [member.rings.share(why if rank == 0 else None) for why in (Interruption.NEWCOMERS, Interruption.STOP)]
    seen.append([why.name for why in told if isinstance(why, Interruption)])
    member.rings.end()
    torch.distributed.barrier()
    torch.save({"seen": seen, "left": member.ring.usage().records}, f"{folder}/late-{rank}.pt")
    torch.distributed.destroy_process_group()


def _names(groups: Sequence[Group]) -> list[bytes]:
    from megatron_webrl.trainer.outline import name_of

    originals = [group(g.ticket, 0) for g in groups]
    return [name_of(i) for g in originals for t in g.trajectories for i in t.images]


def replayed(rank: int, folder: str, names: Sequence[str]) -> None:
    """Successes of both nodes are stored where they came from and offered to all; then one node is left."""
    member = Member(rank, 4, folder, names)
    from megatron_webrl.trainer.replay import Replay

    config, rings = member.config, member.rings
    config.trainer.loss.name, config.trainer.loss.raft_versions, config.trainer.loss.raft_power = "raft", 3, 0.0
    if rank in (0, 2):
        put(member.ring, [group(10 * rank + t, rank // 2) for t in range(1 + rank)])
    groups = member.share(4)
    replay = Replay(config, rings)
    replay.add(groups, 0)
    stored = rings.stored_here(groups) if rings.stores else []
    member.close(groups)
    torch.distributed.barrier()
    if rank == 0:
        put(member.ring, [group(50, 0)])
    member.share(1, 1)
    drawn = replay.draw(1)
    wanted = {r: [bytes(i) for g in drawn for i in g.trajectories[0].images] for r in range(4)}
    brought = rings.shelf.bring(wanted)
    found = {
        "drawn": sorted((g.ticket, g.trajectories[0].index) for g in drawn),
        "images": {
            g.ticket: [bytes(rings.shelf.find(bytes(i))) for i in g.trajectories[0].images] for g in drawn
        },
        "stored": [(t.ticket, t.index, [bytes(i) for i in t.images]) for t in stored],
        "moved": brought.moved, "needed": brought.needed,
    }  # fmt: skip
    rings.end()
    torch.save(found, f"{folder}/replayed-{rank}.pt")
    torch.distributed.destroy_process_group()


def without(rank: int, folder: str, names: Sequence[str], how: str) -> None:
    """One rank ends or stops where others need it; the others write down what they are told, and when."""
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
        Path(folder, f"told-{rank}").write_text(text)
        os._exit(0)


def undecided(rank: int, folder: str) -> None:
    """Both ranks say that they are on node 0 of 2."""
    gloo.join(rank, 2, folder)
    from megatron_webrl.trainer.nodes import NodeError, Nodes

    try:
        Nodes.meet(0, 2)
    except NodeError as error:
        Path(folder, f"told-{rank}").write_text(str(error))
    torch.distributed.destroy_process_group()
