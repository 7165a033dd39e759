"""The prediction of a transfer's time, against sums done by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.weights.engine_map import EngineSizes
from tests.model import tiny
from tools import simulate_reshard
from tools.reshard_links import (
    ClusterSpec,
    GpuSlot,
    LinkDirection,
    ReshardLayout,
    make_transfer_plan,
    place_ranks,
    predict_broadcast,
    predict_shard_to_shard,
    predict_transfer,
)

NVLINK, NIC, LATENCY = 100e9, 10e9, 0.001
STAGING = 2**22


def cluster(nodes: int, gpus: int, nics: int | None = None) -> ClusterSpec:
    return ClusterSpec(nodes, gpus, nics or gpus, NVLINK, NIC, LATENCY)


def model_bytes(description: Any, *, replicated: bool | None = None) -> int:
    """Of all tensors, or of those that tensor parallelism leaves whole or splits."""
    return 2 * sum(
        math.prod(entry.shape)
        for entry in parameter_mappings(description)
        if replicated is None or (entry.layout.kind == "replicated") == replicated
    )


def test_a_message_takes_one_port_of_each_end() -> None:
    some = cluster(2, 8, nics=4)
    assert some.links(GpuSlot(0, 3), GpuSlot(0, 3)) == ()
    assert some.links(GpuSlot(0, 3), GpuSlot(0, 5)) == (
        LinkDirection("NVLink", "out", 0, 3),
        LinkDirection("NVLink", "in", 0, 5),
    )
    assert some.links(GpuSlot(0, 3), GpuSlot(1, 5)) == (
        LinkDirection("NIC", "out", 0, 1),
        LinkDirection("NIC", "in", 1, 2),
    )


def test_the_slowest_link_and_the_longest_chain_give_the_time() -> None:
    nvlink, slow, other = (
        LinkDirection("NVLink", "out", 0, 0),
        LinkDirection("NIC", "in", 1, 3),
        LinkDirection("NIC", "out", 0, 0),
    )
    found = predict_transfer(cluster(2, 8), {nvlink: 90 * 10**9, slow: 20 * 10**9, other: 19 * 10**9}, 7, messages=5)
    assert found.seconds == pytest.approx(2.0 + 0.005)
    assert (found.busiest, found.busiest_bytes) == (slow, 20 * 10**9)
    assert (found.nic_out, found.nic_in, found.received, found.messages) == (19 * 10**9, 20 * 10**9, 7, 5)


def test_ranks_fill_the_nodes_one_after_the_other() -> None:
    shared = place_ranks(cluster(2, 4), ReshardLayout(ParallelSizes(), EngineSizes(2), trainer_gpus=2))
    assert shared.trainer == (GpuSlot(0, 0), GpuSlot(0, 1), GpuSlot(1, 0), GpuSlot(1, 1))
    assert shared.engines == ((GpuSlot(0, 2), GpuSlot(0, 3)), (GpuSlot(1, 2), GpuSlot(1, 3)))
    across = place_ranks(cluster(2, 4), ReshardLayout(ParallelSizes(), EngineSizes(2, 2), trainer_gpus=2))
    assert across.engines == ((GpuSlot(0, 2), GpuSlot(0, 3), GpuSlot(1, 2), GpuSlot(1, 3)),)
    apart = place_ranks(cluster(2, 2), ReshardLayout(ParallelSizes(), EngineSizes(), trainer_gpus=2, trainer_nodes=1))
    assert apart.trainer == (GpuSlot(0, 0), GpuSlot(0, 1))
    assert apart.engines == ((GpuSlot(1, 0),), (GpuSlot(1, 1),))


def test_one_trainer_and_one_engine_on_two_nodes_are_bound_by_the_nic() -> None:
    description = tiny.configuration(tiny.Shape())
    some, layout = cluster(2, 1), ReshardLayout(ParallelSizes(), EngineSizes(), trainer_gpus=1, trainer_nodes=1)
    placement = place_ranks(some, layout)
    plan = make_transfer_plan(description, layout, placement, STAGING)
    found = predict_shard_to_shard(plan, some, placement)
    total = model_bytes(description)
    assert found.nic_out == found.nic_in == found.busiest_bytes == found.received == total
    assert found.messages == math.ceil(total / plan.max_message_bytes)
    assert found.seconds == pytest.approx(total / NIC + LATENCY * found.messages)


def test_replicas_on_one_node_each_serve_an_engine_over_nvlink() -> None:
    description = tiny.configuration(tiny.Shape())
    some, layout = cluster(1, 4), ReshardLayout(ParallelSizes(), EngineSizes(), trainer_gpus=2)
    placement = place_ranks(some, layout)
    found = predict_shard_to_shard(make_transfer_plan(description, layout, placement, STAGING), some, placement)
    assert (found.nic_out, found.nic_in, found.busiest.kind) == (0, 0, "NVLink")
    assert found.busiest_bytes == model_bytes(description)
    assert found.received == 2 * model_bytes(description)


def test_an_engine_split_over_two_ranks_halves_what_is_split() -> None:
    description = tiny.configuration(tiny.Shape())
    some, layout = (
        cluster(2, 2),
        ReshardLayout(ParallelSizes(tensor=2), EngineSizes(2), trainer_gpus=2, trainer_nodes=1),
    )
    placement = place_ranks(some, layout)
    plan = make_transfer_plan(description, layout, placement, STAGING)
    found = predict_shard_to_shard(plan, some, placement)
    assert found.nic_in == plan.received_bytes(0, 0) < 0.75 * model_bytes(description)
    assert found.received == plan.received_bytes(0, 0) + plan.received_bytes(0, 1)


def test_a_broadcast_brings_the_whole_model_to_every_rank() -> None:
    description = tiny.configuration(tiny.Shape())
    some, layout = cluster(2, 4), ReshardLayout(ParallelSizes(tensor=2), EngineSizes(2), trainer_gpus=2)
    found = predict_broadcast(description, layout, some, place_ranks(some, layout), STAGING)
    total, halves = model_bytes(description), model_bytes(description, replicated=False)
    # The ring: the first rank, two engine ranks of its node, two of the other; one hop between the nodes.
    assert found.received == 4 * total
    assert found.nic_out == found.nic_in == total
    assert found.busiest.kind == "NIC"
    messages = (
        math.ceil(total / make_transfer_plan(description, layout, place_ranks(some, layout), STAGING).max_message_bytes)
        + 4
    )
    assert found.messages == messages
    assert found.seconds == pytest.approx(total / NIC + LATENCY * messages)
    alone = predict_broadcast(description, layout, cluster(1, 4), place_ranks(cluster(1, 4), layout), STAGING)
    assert alone.busiest_bytes == total > halves // 2  # the ring's hops outweigh the gathered half


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "235B-A22B", "--nodes", "4"], "235B-A22B has no default layout below 32 nodes"),
        (["--size", "2B", "--trainer", "tp2-xx3"], "'xx3' is none of tp, pp, vpp, ep, etp, cp"),
        (["--size", "2B", "--engine", "tp0"], "'tp0' is none of tp and pp with a number"),
        (["--size", "2B", "--engine", "tp3", "--trainer-gpus", "2"], "tensor_parallel=3 does not divide"),
        (["--size", "2B", "--nodes", "1", "--engine", "tp8"], "engines of 8 GPUs do not divide 4 GPUs"),
        (["--size", "2B", "--engine", "ep", "--nodes", "1"], "needs a mixture of experts"),
        (["--size", "2B", "--trainer-gpus", "8"], "8 of 8 GPUs of a node for the trainer"),
        (["--size", "2B", "--trainer-nodes", "32"], "32 of 32 nodes for the trainer leave none"),
        (["--size", "2B", "--trainer-nodes", "1", "--trainer-gpus", "2"], "leave out --trainer-gpus"),
        (["--size", "2B", "--nics", "16"], "--nics=16 exceeds --gpus=8"),
        (["--size", "2B", "--efficiency", "1.5"], "--efficiency=1.5 is more than 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate_reshard.main(options) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("simulate_reshard: ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("options", [["--nodes", "0"], ["--nic", "0"], ["--latency-us", "nan"], ["--size", "7B"]])
def test_numbers_out_of_range_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate_reshard.main(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_the_table_and_the_file_show_each_size_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert simulate_reshard.main(["--nodes", "1", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert [result["size"] for result in figures["results"]] == ["2B", "4B", "8B"]
    assert "32B has no default layout below 4 nodes" in shown
    speed = figures["cluster"]["nvlink"]
    assert speed == 0.8 * 450e9
    for result in figures["results"]:
        assert result["size"] in shown
        ours = result["shard_to_shard"]
        # Four replicas or pairs of ranks, four engines of one rank: each GPU sends a model and receives one.
        assert ours["busiest_bytes"] == pytest.approx(result["model_bytes"], rel=0.001)
        assert ours["seconds"] == pytest.approx(ours["busiest_bytes"] / speed + 30e-6 * ours["messages"])
        assert ours["received"] == 4 * result["model_bytes"]
        assert result["busiest_sender_to_mean"] == pytest.approx(1, abs=0.01)
    assert figures["results"][1]["nemo_rl_seconds"] == [0.21, 0.34]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--size", "2B", "--nodes", "1", "--json", str(tmp_path / "no" / "file.json")]
    assert simulate_reshard.main(options) == 2
    assert "file.json" in capsys.readouterr().err
