"""Exchange between two nodes, simulated by two rings: training data, image transfers, failures."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.data import replay_buffer
from megatron_webrl.trainer.data.batching import minibatches, training_samples
from megatron_webrl.trainer.data.group_source import GroupSource
from megatron_webrl.trainer.data.prefix_merging import unique_images
from megatron_webrl.trainer.main import make_sequence_packer
from megatron_webrl.trainer.multi_node.exchange import CollectInterrupt, make_exchange
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, NodeTopologyError, RankMessenger
from megatron_webrl.trainer.multi_node.screenshots import image_key, image_size
from megatron_webrl.types import Group
from tests import forks, gloo
from tests.ring.support import damage
from tests.trainer.multi_node.nodes import Member, group, put
from tests.trainer.ranks import (
    VERSION,
    largest_difference,
    make_config,
    make_groups,
    make_learner,
    process_groups,
    results,
    update,
    weights_of,
)
from tests.trajectories import screenshot
from tools.bench import recorded_groups


@dataclass(frozen=True)
class Layout:
    trainer: dict[str, int]
    nodes: tuple[int, ...]


LAYOUTS = {
    "dp2": Layout({"data_parallel": 2}, (0, 1)),
    "pp2 over nodes": Layout({"pipeline_parallel": 2}, (0, 1)),
    "tp2 dp2": Layout({"tensor_parallel": 2, "data_parallel": 2}, (0, 0, 1, 1)),
    "tp2 over nodes, dp2": Layout({"tensor_parallel": 2, "data_parallel": 2}, (0, 1, 0, 1)),
}
HOMES = (0, 0, 1, 0, 0, 0)  # the ring that each group is written to


@pytest.fixture
def names() -> Iterator[list[str]]:
    names = [f"webrl-test-{secrets.token_hex(4)}" for _ in range(2)]
    rings = [Ring.create_or_attach(name, 2**23, name) for name in names]
    yield names
    for ring in rings:
        ring.unlink()
        ring.close()


def updates(platform: Any, folder: Path, model: Path, names: Sequence[str], layout: Layout) -> dict[str, Any]:
    """An update with groups from two rings, and one with the same groups from memory."""
    config = make_config(model, folder, epochs=1, image_workers=int(layout.nodes == (0, 1)), **layout.trainer)
    config.cluster.nodes, rank = 2, torch.distributed.get_rank()
    with process_groups(config):
        if rank == 0:
            for home, each in zip(HOMES, make_groups(config, len(HOMES)), strict=True):
                with Ring.attach(names[home]) as ring:
                    put(ring, [each])
        torch.distributed.barrier()
        found = _update(config, platform, names, layout.nodes[rank])
        learner = make_learner(config, platform)
        expected = update(learner, config, platform, make_groups(config, len(HOMES)))
        return found | {
            "expected": expected,
            "difference": largest_difference(found.pop("weights"), weights_of(learner)),
        }


def _update(config: Config, platform: Any, names: Sequence[str], node: int) -> dict[str, Any]:
    learner = make_learner(config, platform)
    rings = make_exchange(Ring.attach(names[node]), NodeTopology.all_gather(node, 2), config)
    packer = make_sequence_packer(config, platform, image_cache=rings.image_cache)
    taken, source = None, None
    if torch.distributed.get_rank() == 0:
        source = GroupSource(rings, config, ResumePoint(), Accounting())
        taken = source.wait_for_groups(VERSION, len(HOMES), 60.0, lambda ready: True)
    groups = rings.broadcast_groups(taken)
    assert isinstance(groups, list)
    found = _compare_with_plan(packer, groups, config)
    homes = image_homes(config)
    fetched = {bytes(key) for key in rings.image_cache._images}
    found["fetched"] = sorted(key for key in fetched if homes[key] != node)
    found["figures"] = rings.pop_metrics()
    found["result"] = update(learner, config, platform, groups, packer)
    for each, numbers in taken or () if source else ():
        source.close_group(each, numbers)
    rings.finish_collecting()
    torch.distributed.barrier()  # leaders have freed the records
    packer.close()
    return found | {"left": Ring.attach(names[node]).usage().records, "weights": weights_of(learner)}


def image_homes(config: Config) -> dict[bytes, int]:
    groups = zip(HOMES, make_groups(config, len(HOMES)), strict=True)
    return {image_key(i): home for home, each in groups for t in each.trajectories for i in t.images}


def _compare_with_plan(packer: Any, groups: Sequence[Group], config: Config) -> dict[str, Any]:
    """The groups, and the screenshots that this rank encodes; its sequences are those of the plan."""
    parts = minibatches(
        training_samples(groups, config, VERSION), config.trainer.minibatches, config.run.seed + VERSION
    )
    plans = [packer._plan(part, "constant", 10) for part in parts]
    mine: set[bytes] = set()
    for plan, microbatches in zip(plans, packer.build_all(parts, "constant", 10, [1] * len(parts)), strict=True):
        for planned, microbatch in zip(plan[packer.data_parallel_rank], microbatches, strict=True):
            inputs = microbatch.inputs
            tokens = torch.cat([torch.from_numpy(sequence.tokens) for sequence in planned.sequences])
            assert torch.equal(inputs.tokens, tokens.long())
            unique = [bytes(key) for key, _ in unique_images(planned.sequences)]
            mine.update(unique[i] for i in inputs.local_images.tolist())
    return {"mine": mine, "groups": [(g.ticket, [t.index for t in g.trajectories]) for g in groups]}


@pytest.mark.parametrize("name", ["dp2", *(pytest.param(each, marks=pytest.mark.slow) for each in [*LAYOUTS][1:])])
def test_an_update_with_groups_of_two_nodes_is_that_of_one_node_and_moves_only_needed_screenshots(
    names: list[str], tmp_path: Path, tiny_model: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    ranks = results(updates, tmp_path, tiny_model, names, layout, ranks=len(layout.nodes))
    homes = image_homes(make_config(tiny_model))
    moved = 0
    for node, rank in zip(layout.nodes, ranks, strict=True):
        assert rank["groups"] == ranks[0]["groups"]
        (metrics, gap), (expected, expected_gap) = rank["result"], rank["expected"]
        assert metrics["gradient_norm"] > 0
        # A rank computes an image once: operations depend on which samples of an image are on the same one.
        assert metrics == {
            name: pytest.approx(value, rel=0.1 if name == "operations" else 1e-3, abs=1e-6)
            for name, value in expected.items()
        }
        assert gap.tokens == expected_gap.tokens > 0
        assert rank["difference"] < 1e-5
        assert rank["left"] == 0  # trained records are freed in both rings
        foreign = {key for key in rank["mine"] if homes[key] != node}
        assert foreign == set(rank["fetched"])
        moved += sum(map(image_size, foreign))
    figures = ranks[0]["figures"]
    assert moved > 0  # five of six groups are on one node
    assert figures["nodes/remote_images_mib"] * 2**20 == pytest.approx(moved)
    assert 0 < figures["nodes/other_mib"] < figures["nodes/images_mib"]


def late_and_damaged(_: Any, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Node 1 has no groups until the first update is made, then more than node 0. Then each has a damaged record."""
    member, rank, seen = Member(folder, names), torch.distributed.get_rank(), list[Any]()
    if rank == 0:
        put(member.ring, [group(t, 0) for t in (0, 1)])
    for number in range(3):
        groups = member.share(2)
        seen.append([g.ticket for g in groups])
        originals = [group(g.ticket, 0) for g in groups]
        keys = [image_key(i) for g in originals for t in g.trajectories for i in t.images]
        assert [bytes(i) for g in groups for t in g.trajectories for i in t.images] == keys
        member.close(groups)
        if number == 0:
            put(member.ring, [group(t, 1) for t in (2, 3, 4)] if rank else [group(5, 0)])
        torch.distributed.barrier()
    whys = [CollectInterrupt.NEW_ENGINES, CollectInterrupt.STOP]
    interrupts = [member.rings.broadcast_groups(why if rank == 0 else None) for why in whys]
    member.rings.finish_collecting()
    torch.distributed.barrier()
    left = member.ring.usage().records

    put(member.ring, [group(10 + 2 * t + rank, rank) for t in range(2)])
    damage(member.ring, member.ring.committed()[0], -1)  # of the first group
    torch.distributed.barrier()
    groups = member.share(2)
    member.close(groups)
    lost = member.source and member.source.lost_tickets

    if rank == 0:
        put(member.ring, [group(20, 0)])
    member.close(member.share(1))
    freed = not member.rings.image_cache.has_image(image_key(screenshot(0)), frozenset({1}))  # of earlier updates
    member.rings.finish_collecting()
    torch.distributed.barrier()
    return {"seen": seen, "interrupts": interrupts == whys, "left": left, "whole": [g.ticket for g in groups],
            "lost": lost, "freed": freed}  # fmt: skip


def test_a_node_without_groups_delays_no_other_and_damaged_records_cost_their_episodes_only(
    names: list[str], tmp_path: Path
) -> None:
    first, second = results(late_and_damaged, tmp_path, names)
    assert first | {"lost": None} == second
    assert first["seen"][0] == [0, 1]
    assert sorted(first["seen"][1] + first["seen"][2]) == [2, 3, 4, 5]
    assert (first["interrupts"], first["left"], first["whole"], first["lost"]) == (True, 0, [12, 13], 2)
    assert first["freed"]
    own = tmp_path / "late_and_damaged"
    for folder in ("run/damaged_records", "damaged_records/node-1"):
        assert [path.suffix for path in (own / folder).glob("*.record")] == [".record"]


def replayed(_: Any, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Each node stores its successes, and all ranks replay those of both nodes."""
    member, rank = Member(folder, names), torch.distributed.get_rank()
    config, rings = member.config, member.rings
    config.trainer.loss = loss_config("raft", replay_versions=3)
    if rank in (0, 2):
        put(member.ring, [group(10 * rank + t, rank // 2) for t in range(1 + rank)])
    groups = member.share(4)
    replay = replay_buffer.ReplayBuffer(config, rings, decay_power=0.0)
    replay.add(groups, 0)
    member.close(groups)
    torch.distributed.barrier()
    if rank == 0:
        put(member.ring, [group(50, 0)])
    member.share(1, 1)
    drawn = {g.ticket: g.trajectories[0] for g in replay.batch([], 1)}
    cache = rings.image_cache
    cache.fetch({r: [bytes(i) for t in drawn.values() for i in t.images] for r in range(4)})
    images = {ticket: [bytes(cache.get(bytes(i))) for i in t.images] for ticket, t in drawn.items()}
    moved = cache.transferred_bytes
    # A group that failed as a whole is completed by the success of its task, whichever node has stored it.
    config.trainer.loss = loss_config("grpo", replay_into_failed_groups=3)
    failed = [
        Group(
            ticket, tuple(replace(t, outcome="failure", reward=0.0, task=task) for t in group(ticket, 0).trajectories)
        )
        for ticket, task in ((90, drawn[0].task), (91, drawn[21].task), (92, replace(drawn[0].task, id="another")))
    ]
    completed = replay_buffer.ReplayBuffer(config, rings, version=1).batch(failed, 1)
    joined = {g.ticket: g.trajectories[-1] for g in completed if g.trajectories[-1].outcome == "success"}
    rings.finish_collecting()
    return {
        "indices": {t.index for t in drawn.values()}, "images": images, "moved": moved,
        "joined": {ticket: (t.index, t.task.id) for ticket, t in joined.items()},
    }  # fmt: skip


@pytest.mark.slow
def test_each_node_stores_its_successes_and_all_ranks_replay_them(names: list[str], tmp_path: Path) -> None:
    ranks = results(replayed, tmp_path, names, ranks=4)
    wanted = {ticket: list(group(ticket, 0).trajectories[0].images) for ticket in (0, 20, 21, 22)}
    for rank in ranks:
        assert (rank["indices"], rank["images"]) == ({0}, wanted)
        size = len(group(0, 0).trajectories)
        assert rank["joined"] == {
            90: (size, group(0, 0).trajectories[0].task.id), 91: (size, group(21, 1).trajectories[0].task.id)
        }  # fmt: skip
    folder = tmp_path / "replayed" / "run" / "replay"
    for node, tickets in ((0, [0]), (1, [20, 21, 22])):
        stored = recorded_groups.read_groups(replay_buffer.group_file_path(folder, 0, node))
        assert [each.ticket for each in stored] == tickets
    assert [each.ticket for each in recorded_groups.read_groups_of_version(folder, 0)] == [0, 20, 21, 22]
    # The screenshot shared by all episodes is on all nodes and is not transferred.
    own = {ticket: len(images[0]) for ticket, images in wanted.items()}
    assert ranks[0]["moved"] == 2 * own[0] + 2 * sum(own[ticket] for ticket in (20, 21, 22))


def without(rank: int, folder: str, names: Sequence[str], how: str) -> None:
    """One rank is killed or stopped while others need it; the others write down their errors and times."""
    gloo.join(rank, 4, folder)
    member = Member(Path(folder), names, exchange_seconds=8.0)
    if rank == 0:
        put(member.ring, [group(0, 0)])
    member.share(1)
    torch.distributed.barrier()
    if rank == (0 if how == "first" else 2):
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    begun = time.monotonic()
    try:
        member.share(1)
    except RuntimeError as error:
        text = f"{time.monotonic() - begun}\n{type(error).__name__}\n{error}"
        Path(folder, f"error-{rank}").write_text(text)
        os._exit(0)


@pytest.mark.parametrize(
    ("how", "errors"),
    [
        ("killed", {0: "trainer-2 on node 1 is gone: ", 1: "trainer-", 3: "trainer-2 on node 1 is gone: "}),
        pytest.param(
            "stopped", {0: "trainer-2 on node 1 did not receive a message within 8 s: "}, marks=pytest.mark.slow
        ),
        pytest.param("first", dict.fromkeys((1, 2), "trainer-0 on node 0 is gone: "), marks=pytest.mark.slow),
    ],
)
def test_a_missing_rank_is_named_within_the_limit(
    names: list[str], tmp_path: Path, how: str, errors: dict[int, str]
) -> None:
    context = forks.start(without, str(tmp_path), names, how, ranks=4)
    deadline = time.monotonic() + 120
    try:
        while not all((tmp_path / f"error-{rank}").is_file() for rank in errors):
            assert time.monotonic() < deadline, sorted(path.name for path in tmp_path.iterdir())
            time.sleep(0.05)
    finally:
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
    for rank, expected in errors.items():
        seconds, kind, text = (tmp_path / f"error-{rank}").read_text().split("\n", 2)
        assert kind == "RankMessageError"
        assert text.startswith(expected)
        assert "\n" not in text
        assert float(seconds) < 14.0


@pytest.mark.usefixtures("one_rank")
def test_a_broadcast_waits_as_long_as_rank_0_may_and_a_message_no_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messenger, content, limits = RankMessenger(NodeTopology((0, 0), 1), 5.0, 300.0), pickle.dumps("groups"), []

    def receive(tensor: torch.Tensor, peer: int, group: Any) -> Any:
        """A message that arrives when it is waited for."""

        def wait(limit: timedelta) -> None:
            limits.append(limit.total_seconds())
            tensor.copy_(torch.tensor([len(content)]) if tensor.dtype is torch.int64 else torch.tensor([*content]))

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(torch.distributed, "irecv", receive)
    assert (messenger.broadcast(), messenger.receive(0), messenger.receive(0, 60.0)) == ("groups",) * 3
    assert limits == [300.0, 5.0, 5.0, 5.0, 60.0, 5.0]


def both_on_node_0(*_: Any) -> None:
    with pytest.raises(NodeTopologyError, match=r"no trainer rank is on node 1 of cluster\.nodes=2"):
        NodeTopology.all_gather(0, 2)


def test_a_node_without_a_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    results(both_on_node_0, tmp_path)
