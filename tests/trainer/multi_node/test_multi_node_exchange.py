"""Exchange between two nodes, simulated by two rings: training data, image transfers, failures."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.ring.ring import Ring
from megatron_webrl.trainer.data import replay_buffer
from megatron_webrl.trainer.multi_node.screenshots import image_key, image_size
from tests import forks
from tests.gloo import spawn
from tests.trainer.learner_ranks import make_config, make_groups
from tests.trainer.multi_node import node_ranks
from tools.bench import recorded_groups

pytestmark = pytest.mark.slow

Found = dict[str, list[dict[str, Any]]]


def make_rings() -> Iterator[list[str]]:
    names = [f"webrl-test-{secrets.token_hex(4)}" for _ in range(2)]
    rings = [Ring.create_or_attach(name, 2**23, name) for name in names]
    yield names
    for ring in rings:
        ring.unlink()
        ring.close()


@pytest.fixture
def names() -> Iterator[list[str]]:
    yield from make_rings()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Found]:
    """Layout -> results of each rank."""
    folder = tmp_path_factory.mktemp("nodes")
    for names in make_rings():
        for layouts, ranks in ((node_ranks.PAIRS, 2), (node_ranks.FOURS, 4)):
            spawn(node_ranks.updates, ranks, str(folder), str(tiny_model), names, layouts, ranks=ranks)
        yield {
            name: [torch.load(folder / f"found-{name}-{r}.pt", weights_only=False) for r in range(len(layout.nodes))]
            for name, layout in (node_ranks.PAIRS | node_ranks.FOURS).items()
        }


LAYOUTS = pytest.mark.parametrize("layout", [*node_ranks.PAIRS, *node_ranks.FOURS])


@LAYOUTS
def test_every_rank_trains_on_the_planned_data_byte_for_byte(found: Found, layout: str) -> None:
    assert all(rank["nodes"]["same"] for rank in found[layout])
    assert len({str(rank["nodes"]["groups"]) for rank in found[layout]}) == 1
    assert [ticket for ticket, _ in found[layout][0]["nodes"]["groups"]] != []
    tokens = found[layout][0]["nodes"]["tokens"]
    assert all(rank["nodes"]["tokens"] == tokens for rank in found[layout])


@LAYOUTS
def test_an_update_equals_that_of_one_node_with_the_same_groups(found: Found, layout: str) -> None:
    for rank in found[layout]:
        (metrics, gap), (expected, expected_gap) = rank["nodes"]["result"], rank["one"]["result"]
        assert metrics["gradient_norm"] > 0
        # A rank computes an image once: operations depend on which samples of an image are on the same one.
        assert metrics == {
            name: pytest.approx(value, rel=0.1 if name == "operations" else 1e-3, abs=1e-6)
            for name, value in expected.items()
        }
        assert gap.tokens == expected_gap.tokens > 0
        for name, tensor in rank["nodes"]["weights"].items():
            assert float((tensor - rank["one"]["weights"][name]).abs().max()) < 1e-5, name


@LAYOUTS
def test_screenshots_move_only_to_ranks_that_need_them_and_are_counted(
    found: Found, layout: str, tiny_model: Path
) -> None:
    groups = make_groups(make_config(str(tiny_model)), len(node_ranks.HOMES))
    homes = {
        image_key(image): home
        for home, group in zip(node_ranks.HOMES, groups, strict=True)
        for each in group.trajectories
        for image in each.images
    }
    nodes = (node_ranks.PAIRS | node_ranks.FOURS)[layout].nodes
    moved = needed = 0
    for node, rank in zip(nodes, found[layout], strict=True):
        foreign = {name for name in rank["nodes"]["mine"] if homes[name] != node}
        assert foreign == set(rank["nodes"]["fetched"])
        moved += sum(map(image_size, foreign))
        needed += sum(map(image_size, rank["nodes"]["mine"]))
    figures = found[layout][0]["nodes"]["figures"]
    assert moved > 0  # five of six groups are on one node
    assert figures["nodes/remote_images_mib"] * 2**20 == pytest.approx(moved)
    assert figures["nodes/images_mib"] * 2**20 == pytest.approx(needed)
    assert figures["nodes/local_fraction"] == pytest.approx(1 - moved / needed)
    assert 0 < figures["nodes/other_mib"] < figures["nodes/images_mib"]


def test_replicas_on_two_nodes_get_equal_loads(found: Found) -> None:
    rows, tokens = found["dp2"][0]["nodes"]["rows"], found["dp2"][0]["nodes"]["tokens"]
    assert rows[::2] == rows[1::2]
    assert max(sum(tokens[::2]), sum(tokens[1::2])) < 0.6 * sum(tokens)


@LAYOUTS
def test_trained_records_are_freed_in_both_rings(found: Found, layout: str) -> None:
    assert [rank["nodes"]["left"] for rank in found[layout]] == [0] * len(found[layout])


def test_damaged_records_of_two_nodes_cost_their_episodes_only(names: list[str], tmp_path: Path) -> None:
    spawn(node_ranks.damaged, str(tmp_path), names, seconds=300)
    for folder in ("run/damaged_records", "damaged_records/node-1"):
        assert [path.suffix for path in (tmp_path / folder).glob("*.record")] == [".record"]


def test_a_node_without_groups_delays_no_other(names: list[str], tmp_path: Path) -> None:
    spawn(node_ranks.late, str(tmp_path), names, seconds=300)
    first, second = (torch.load(tmp_path / f"late-{rank}.pt") for rank in (0, 1))
    assert first["seen"] == second["seen"]
    assert first["seen"][0] == [0, 1]
    assert sorted(first["seen"][1] + first["seen"][2]) == [2, 3, 4, 5]
    assert first["seen"][3] == ["NEW_ENGINES", "STOP"]
    assert first["left"] == second["left"] == 0


def test_each_node_stores_its_successes_and_all_ranks_replay_them(names: list[str], tmp_path: Path) -> None:
    spawn(node_ranks.replayed, str(tmp_path), names, ranks=4, seconds=300)
    ranks = [torch.load(tmp_path / f"replayed-{rank}.pt") for rank in range(4)]
    wanted = {ticket: list(node_ranks.group(ticket, 0).trajectories[0].images) for ticket in (0, 20, 21, 22)}
    for rank in ranks:
        assert rank["drawn"] == [(ticket, 0) for ticket in wanted]
        assert rank["images"] == wanted
    folder = tmp_path / "run" / "replay"
    for node, tickets in ((0, [0]), (1, [20, 21, 22])):
        stored = recorded_groups.read_groups(replay_buffer.group_file_path(folder, 0, node))
        assert [group.ticket for group in stored] == tickets
        assert {(t, i) for t, i, _ in ranks[2 * node]["stored"]} == {(t, i) for t in tickets for i in (0, 1)}
        for ticket, index, images in ranks[2 * node]["stored"]:
            assert images == list(node_ranks.group(ticket, 0).trajectories[index].images)
    assert [group.ticket for group in recorded_groups.read_groups_of_version(folder, 0)] == [0, 20, 21, 22]
    # The screenshot shared by all episodes is on all nodes and is not transferred.
    own = {ticket: len(images[0]) for ticket, images in wanted.items()}
    assert ranks[0]["moved"] == 2 * own[0] + 2 * sum(own[ticket] for ticket in (20, 21, 22))


@pytest.mark.parametrize(
    ("how", "errors"),
    [
        ("killed", {0: "trainer-2 on node 1 is gone: ", 1: "trainer-", 3: "trainer-2 on node 1 is gone: "}),
        ("stopped", {0: "trainer-2 on node 1 did not receive a message within 8 s: "}),
        ("first", {1: "trainer-0 on node 0 is gone: ", 2: "trainer-0 on node 0 is gone: "}),
    ],
)
def test_a_missing_rank_is_named_within_the_limit(
    names: list[str], tmp_path: Path, how: str, errors: dict[int, str]
) -> None:
    context = forks.start(node_ranks.without, str(tmp_path), names, how, ranks=4)
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


def test_a_node_without_a_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    spawn(node_ranks.undecided, str(tmp_path), seconds=300)
    for rank in (0, 1):
        assert "no trainer rank is on node 1 of cluster.nodes=2" in (tmp_path / f"error-{rank}").read_text()
