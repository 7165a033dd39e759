"""Who is at fault, from the results of all nodes: by hand, and for any faulty GPUs that leave enough good ones."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.checks.node_network import (
    ExchangeResult,
    Status,
    blame_group,
    blame_links,
    neighbour_rounds,
    slow_gpus,
    socket_warning,
)

OK, FAILED, LOCAL, HUNG = Status
Rows = dict[int, dict[int, list[ExchangeResult]]]


def circle(count: int, gpus: int, bad: Iterable[tuple[int, int]]) -> Rows:
    """Results of nodes in a circle in which all exchanges of the `bad` (node, GPU) time out at both ends."""
    rows: Rows = {node: {} for node in range(count)}
    for a, b in (pair for pairs in neighbour_rounds(count) for pair in pairs):
        states = [FAILED if {(a, gpu), (b, gpu)} & set(bad) else OK for gpu in range(gpus)]
        rows[a][b] = [ExchangeResult(state) for state in states]
        rows[b][a] = [ExchangeResult(state) for state in states]
    return rows


def ends(first: Status, second: Status) -> Rows:
    return {0: {1: [ExchangeResult(first)]}, 1: {0: [ExchangeResult(second)]}}


@given(st.integers(4, 12), st.integers(1, 8), st.data())
@settings(max_examples=60)
def test_bad_gpus_are_found_if_their_neighbours_have_a_good_link(count: int, gpus: int, data: st.DataObject) -> None:
    bad = set()
    for gpu in range(gpus):  # at most one bad node in any four that follow each other
        first = data.draw(st.integers(0, 3))
        bad |= {(node, gpu) for node in range(first, count - 3 + first, 4) if data.draw(st.booleans())}
    found = blame_links(circle(count, gpus, bad))
    assert {(node, gpu) for node, several in found.items() for gpu in several} == bad


def test_a_good_node_between_two_bad_ones_passes() -> None:
    assert blame_links(circle(6, 1, [(1, 0), (3, 0)])) == {1: [0], 3: [0]}


def test_a_node_with_one_good_link_of_a_gpu_passes() -> None:
    rows = circle(4, 2, [])
    rows[1][2][1] = rows[2][1][1] = ExchangeResult(FAILED)
    assert blame_links(rows) == {}


@pytest.mark.parametrize(
    ("first", "second", "faulty"),
    [
        (OK, OK, []),
        (FAILED, FAILED, [1]),  # unknown: of two nodes, the first passes
        (FAILED, OK, [1]),
        (HUNG, FAILED, [0]),
        (FAILED, HUNG, [1]),
        (HUNG, HUNG, [1]),
        (LOCAL, LOCAL, [0, 1]),
        (LOCAL, HUNG, [0, 1]),
        (LOCAL, FAILED, [0]),
        (FAILED, LOCAL, [1]),
    ],
)
def test_of_two_nodes_the_one_that_did_not_wait_is_at_fault(first: Status, second: Status, faulty: list[int]) -> None:
    assert sorted(blame_links(ends(first, second))) == faulty


@pytest.mark.parametrize(
    ("states", "complete", "faulty"),
    [
        ([[OK], [OK]], True, []),
        ([[FAILED, FAILED], [FAILED, HUNG]], True, [1]),
        ([[FAILED], [FAILED], [LOCAL]], True, [2]),
        ([[FAILED], [FAILED], [OK]], True, [0, 1]),
        ([[HUNG], [HUNG]], True, [0, 1]),
        ([[FAILED], [FAILED]], False, []),
        ([[LOCAL], [FAILED]], False, [0]),
    ],
)
def test_of_a_group_the_members_that_stand_out_are_at_fault(
    states: list[list[Status]], complete: bool, faulty: list[int]
) -> None:
    results = {node: [ExchangeResult(state) for state in row] for node, row in enumerate(states)}
    assert blame_group(results, complete=complete) == faulty


def test_a_gpu_far_below_the_median_of_its_node_is_slow() -> None:
    def row(*speeds: float) -> list[ExchangeResult]:
        return [ExchangeResult(OK, speed) for speed in speeds]

    assert slow_gpus({1: row(24, 23, 11, 22), 2: row(20, 4, 10, 25)}) == {2: (11, 23.5)}  # gpu 1 is good with node 1
    assert slow_gpus({}) == {}


def test_infiniband_without_a_fast_link_is_a_warning() -> None:
    def row(*speeds: float) -> list[ExchangeResult]:
        return [ExchangeResult(OK, speed) for speed in speeds]

    slow = {1: row(1.5, 2.25), 2: row(0.5, 2.0)}
    assert "no link is faster than 2.25 GiB/s, although the node has mlx5_0, mlx5_1" in socket_warning(
        slow, ["mlx5_0", "mlx5_1"]
    )
    for results, cards in ((slow, []), ({1: row(1.5, 20.0)}, ["mlx5_0"]), ({1: row(0.0)}, ["mlx5_0"]), ({}, ["a"])):
        assert socket_warning(results, cards) == ""
