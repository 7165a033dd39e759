"""Checks that nodes do together: each one passes here, and a fault is blamed on the node that has it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from megatron_webrl.checks import node_network
from megatron_webrl.checks.node import NodeCheck
from megatron_webrl.checks.node_network import (
    ExchangeRank,
    NodeDevices,
    NodeGroup,
    Status,
    check_all_reduce,
    check_devices,
    check_links,
    clock_offset,
    good_members,
    link_failure,
    neighbour_rounds,
    run_ranks,
    warm_up,
)
from megatron_webrl.checks.report import CheckFailed
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.node_reports import bad_nodes, report_folder
from tests import forks
from tests.waiting import until

pytestmark = pytest.mark.alone  # it needs free ports and measures speeds

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    forks.context()
    warm_up()


def made(*overrides: str) -> Config:
    return parse_config(None, list(overrides))


def together(work: list[Callable[[], Any]], seconds: float = 120.0) -> list[Any]:
    """The results of functions that run at the same time; a CheckFailed is a result, too."""
    results: list[Any] = [None] * len(work)

    def run(number: int) -> None:
        try:
            results[number] = work[number]()
        except CheckFailed as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(work))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(deadline - time.monotonic())
        assert not thread.is_alive()
    return results


def groups(names: Sequence[str]) -> list[NodeGroup]:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False) for _ in names[1:]]
    return [NodeGroup(i, names, "127.0.0.1", store) for i, store in enumerate([host, *others])]


def devices(node: str, count: int = 1, size: int = 4 * MIB) -> NodeDevices:
    return NodeDevices(node, count, cuda=False, message_bytes=size)


def process_named(name: str) -> int:
    """The pid of the process with this name, once it runs."""
    found: list[int] = []

    def look() -> bool:
        for path in Path("/proc").glob("[0-9]*/comm"):
            try:
                if path.read_text().strip() == name:
                    found.append(int(path.parent.name))
            except OSError:  # it has ended
                continue
        return bool(found)

    until(look, f"process {name}", 60)
    return found[0]


def test_a_gpu_uses_its_own_card_in_a_pair_and_all_cards_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[ExchangeRank] = []
    monkeypatch.setattr(node_network, "run_ranks", lambda ranks: ran.extend(ranks) or [])
    devices = NodeDevices("n1", 3, True, ["a", "a", "b"])
    devices.run("n1", 1, "link", 0, 2, 1.0, pairs=True)
    devices.run("n1", 1, "all-reduce", 0, 6, 1.0)
    assert [list(rank.nics) for rank in ran] == [["a"], ["a"], ["b"], *[["a", "b"]] * 3]


# -- clocks and rounds --------------------------------------------------------------------------------


def test_a_clock_that_differs_from_the_first_nodes_is_found() -> None:
    first, second, third = groups(["n1", "n2", "n3"])
    late = {1: 5.0}

    def compare(group: NodeGroup) -> tuple[float, list[int]]:
        gather = group.gather
        group.gather = lambda stage, value: gather(stage, value - late.get(group.index, 0.0))  # type: ignore[method-assign]
        return clock_offset(group)

    found = together([lambda group=group: compare(group) for group in (first, second, third)])
    assert [good for _, good in found] == [[0, 2]] * 3
    assert found[1][0] == pytest.approx(5.0, abs=1.5)


@pytest.mark.parametrize("count", range(1, 20))
def test_a_round_contains_each_member_at_most_once(count: int) -> None:
    found = neighbour_rounds(count)
    for pairs in found:
        everyone = [each for pair in pairs for each in pair]
        assert len(everyone) == len(set(everyone))
    edges = {frozenset(pair) for pairs in found for pair in pairs}
    assert edges == {frozenset((i, (i + 1) % count)) for i in range(count) if count > 1}


def test_a_node_that_cannot_reach_the_first_one_fails(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"n1 did not start the network check within 1 s"):
        NodeGroup.join(1, ["n1", "n2"], "127.0.0.1", tmp_path / "meeting", seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "meeting").write_text(str(server.getsockname()[1]))
    with pytest.raises(CheckFailed, match=r"no connection to n1 \(127.0.0.1\) within 2 s"):
        NodeGroup.join(1, ["n1", "n2"], "127.0.0.1", tmp_path / "meeting", seconds=2)


def test_an_absent_node_is_no_member(tmp_path: Path) -> None:
    names = ["n1", "n2", "n3"]
    path = tmp_path / "meeting"

    def take_part(number: int) -> list[int]:
        meeting = NodeGroup.join(number, names, "127.0.0.1", path)
        try:
            return list(meeting.gather("local", True, seconds=3))
        finally:
            meeting.leave()

    assert together([lambda: take_part(0), lambda: take_part(2)]) == [[0, 2], [0, 2]]


# -- exchanges ----------------------------------------------------------------------------------------


def test_all_devices_of_all_nodes_reduce_together() -> None:
    names = ["n1", "n2", "n3"]
    found = together([lambda g=g: check_all_reduce(g, [0, 1, 2], devices(names[g.index], 2)) for g in groups(names)])  # type: ignore[misc]
    assert all(0.001 < speed < 1000 for speed in found), found


def test_an_all_reduce_without_an_answer_of_its_members_names_them() -> None:
    [first, second] = groups(["n1", "n2"])
    found = together(
        [lambda: check_all_reduce(first, [0, 1], devices("n1"), 2), lambda: second.gather("all-reduce", None)],
    )
    assert found[0] == 0.0  # the silent member is at fault
    [first, second, third] = groups(["n1", "n2", "n3"])
    failed = [(Status.FAILED, 0.0, "timed out")]
    found = together(
        [
            lambda: check_all_reduce(first, [0, 1, 2], devices("n1"), 2),
            lambda: second.gather("all-reduce", failed),
            lambda: third.gather("all-reduce", failed),
        ]
    )
    assert "all-reduce with n2, n3 failed" in str(found[0])  # no member stands out


def links(nodes: list[NodeGroup], count: int, minimum: float = 0.0, seconds: float = 30.0) -> list[Any]:
    """Functions that return why the links of a node fail, and the members that are left."""

    def run(group: NodeGroup) -> tuple[str, list[int]]:
        mine = devices(group.names[group.index], count)
        members = list(range(len(group.names)))
        results = check_links(group, members, mine, minimum, seconds)
        return link_failure(group, results, mine), good_members(members, results)

    return [lambda group=group: run(group) for group in nodes]


def test_every_device_has_a_link_with_each_neighbour() -> None:
    names = ["n1", "n2", "n3"]
    nodes = groups(names)
    found = together([lambda g=g: check_links(g, [0, 1, 2], devices(names[g.index], 2), 0.0) for g in nodes])  # type: ignore[misc]
    assert found[0] == found[1] == found[2]
    assert {node: sorted(rows) for node, rows in found[0].items()} == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    results = [result for rows in found[0].values() for row in rows.values() for result in row]
    assert len(results) == 12
    assert all(result.status == Status.OK and result.gib_per_second > 0.001 for result in results)


def test_a_node_that_does_not_take_part_fails_alone() -> None:
    nodes = groups(["n1", "n2", "n3", "n4"])
    work = links([nodes[0], nodes[1], nodes[3]], 1, seconds=4)
    found = together([*work, lambda: nodes[2].gather("link", None)])
    assert found[:3] == [("", [0, 1, 3])] * 3


def test_links_that_are_too_slow_are_named() -> None:
    found = together(links(groups(["n1", "n2"]), 1, 1e6))
    assert found[0] == ("", [0])  # of two nodes, the first passes
    assert found[1][0].startswith("all-reduce with n1: ")
    assert "GiB/s, below 1e+06" in found[1][0]


@pytest.mark.parametrize(
    ("names", "bad", "signals", "words"),
    [
        (["n1", "n2", "n3"], "n2", [signal.SIGSTOP], "process 1: all-reduce with n1: its process hung"),
        (["n1", "n2", "n3"], "n2", [signal.SIGKILL], "process 1: all-reduce with n1: its process killed by SIGKILL"),
        (["n1", "n2"], "n1", [signal.SIGSTOP], "process 1: all-reduce with n2: its process hung"),
        (["n1", "n2", "n3"], "n2", [signal.SIGSTOP, signal.SIGCONT], ""),
    ],
    ids=["hangs", "is killed", "the first of two hangs", "is slow"],
)
def test_the_node_whose_device_fails_is_blamed(
    names: list[str], bad: str, signals: list[signal.Signals], words: str
) -> None:
    nodes = groups(names)
    work = links(nodes, 2, seconds=8)  # within which the first process must be found
    index = names.index(bad)

    def disturb() -> None:
        pid = process_named(f"{bad}.cpu1")  # it waits for its neighbour, which has not started
        for number, name in enumerate(signals):
            if number:
                time.sleep(1.0)
            os.kill(pid, name)
        disturbed.set()

    def wait_and_run(number: int) -> Any:
        assert disturbed.wait(60)
        return work[number]()

    disturbed = threading.Event()
    rest = [number for number in range(len(names)) if number != index]
    found = together([work[index], disturb, *(lambda number=number: wait_and_run(number) for number in rest)])
    good = rest if words else list(range(len(names)))
    assert found[0][0].startswith(words), found
    assert bool(found[0][0]) == bool(words), found
    assert [each[0] for each in found[2:]] == [""] * len(rest)
    assert {tuple(each[1]) for each in (found[0], *found[2:])} == {tuple(good)}


def test_a_device_that_fails_among_those_of_its_node_is_named() -> None:
    assert check_devices(devices("n1", 2)) > 0.001

    def kill() -> None:
        os.kill(process_named("n1.cpu2"), signal.SIGKILL)

    found = together([lambda: check_devices(devices("n1", 3, 256 * MIB), 8), kill])
    assert str(found[0]).startswith("process 2: all-reduce among the node's 3 failed: its process killed by SIGKILL")


def test_a_device_that_cannot_hold_the_message_is_a_fault_of_this_node() -> None:
    [result] = run_ranks([ExchangeRank("n1.cpu0", "127.0.0.1", 1, "link", 0, 2, 5.0, 2**60)])
    assert result.status is Status.LOCAL
    assert result.message.startswith("CPU: ")


# -- nodes --------------------------------------------------------------------------------------------


def test_nodes_check_each_other_and_write_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(f"run.directory={tmp_path}", "run.name=run")
    report_folder(config).mkdir(parents=True)
    names = ["n1", "n2", "n3"]
    checks = [
        NodeCheck(config, name, names, "127.0.0.1", devices=2, message_bytes=4 * MIB, checks=["cores"][: name == "n2"])
        for name in names
    ]

    def fail(*_: object) -> str:
        raise CheckFailed("they are not mine")

    monkeypatch.setattr("megatron_webrl.checks.node.CHECKS", {"cores": fail})
    for node, lines in zip(names, together([check.run for check in checks]), strict=True):
        assert [each.name for each in lines if each.status == "failed"] == (["cores"] if node == "n2" else [])
    assert bad_nodes(config, [*names, "n4"]) == {
        "n2": "cores: they are not mine",
        "n4": "its check did not finish; search the job's log for its name",
    }
    results = json.loads((report_folder(config) / "n3.json").read_text())["results"]
    figures = {each["name"]: each["value"] for each in results}
    assert all(figures[name] > 0 for name in ("all-reduce of the node", "all-reduce of all", "link n1"))
    assert abs(figures["clock"]) < 1.5


def test_the_only_good_node_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise CheckFailed("it shows nothing")

    monkeypatch.setattr("megatron_webrl.checks.node.CHECKS", {"browser": fail})
    config = made(f"run.directory={tmp_path}", "run.name=run")
    report_folder(config).mkdir(parents=True)
    names = ["n1", "n2"]
    checks = [NodeCheck(config, name, names, "127.0.0.1", checks=["browser"][: name == "n2"]) for name in names]
    together([check.run for check in checks])
    assert bad_nodes(config, names) == {"n2": "browser: it shows nothing"}


def test_a_node_of_another_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"node n9 .* is not one of n1, n2"):
        NodeCheck(made(), "n9", ["n1", "n2"], "127.0.0.1")
