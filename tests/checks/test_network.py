"""All-reduces of GPUs and nodes: each one passes here, and a fault is blamed on the node that has it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from megatron_webrl.checks import network, node
from megatron_webrl.checks.network import ROUNDS, Link, NodeNetwork, Rank, all_reduce, blame, peer, slow_link
from megatron_webrl.checks.node import check_node
from megatron_webrl.checks.report import CheckFailed, CheckResult
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.run_folder import report_folder
from megatron_webrl.launch.slurm.prepare import bad_nodes

MIB = 2**20
GOOD, BAD, LOCAL = Link(10.0), Link(error="timed out"), Link(error="hung", local=True)


# -- who is at fault --------------------------------------------------------------------------------------------------


def paired(count: int, bad: Iterable[int]) -> dict[int, dict[int, Link]]:
    """Links of `count` nodes of which those of `bad` nodes time out at both ends."""
    links: dict[int, dict[int, Link]] = {number: {} for number in range(count)}
    for round_number in range(1, 1 + min(ROUNDS, count)):
        for number, row in links.items():
            if (other := peer(number, count, round_number)) is not None:
                assert peer(other, count, round_number) == number
                row[other] = BAD if {number, other} & set(bad) else GOOD
    return links


@given(st.integers(3, 40), st.data())
def test_bad_nodes_are_found_if_every_good_one_has_a_good_link(count: int, data: st.DataObject) -> None:
    assert blame(paired(count, [])) == set()
    one = data.draw(st.integers(0, count - 1))
    assert blame(paired(count, [one])) == {one}
    bad = set(data.draw(st.lists(st.integers(0, count - 1), max_size=count // 3)))
    links = paired(count, bad)
    if all(set(row) - bad for number, row in links.items() if number not in bad):
        assert blame(links) == bad


def test_of_two_nodes_the_one_with_the_fault_is_blamed() -> None:
    for first, second, faulty in (
        (GOOD, GOOD, set()),
        (BAD, BAD, {1}),  # unknown: of two nodes, the first passes
        (BAD, GOOD, {1}),
        (LOCAL, BAD, {0}),
        (BAD, LOCAL, {1}),
        (LOCAL, LOCAL, {0, 1}),
    ):
        assert blame({0: {1: first}, 1: {0: second}}) == faulty


def test_a_node_far_below_the_median_of_all_is_slow() -> None:
    links = {0: {1: Link(20), 2: Link(4)}, 1: {0: Link(20), 2: Link(4)}, 2: {0: Link(4), 1: Link(4)}}
    assert [bool(slow_link(links, number)) for number in range(3)] == [False, False, True]
    assert "4.00 GiB/s" in slow_link(links, 2)
    assert slow_link({}, 0) == ""


# -- processes and nodes ----------------------------------------------------------------------------------------------


def together(*work: Callable[[], Any], seconds: float = 50.0) -> list[Any]:
    """The results of functions that run at the same time."""
    results: list[Any] = [None] * len(work)

    def run(number: int) -> None:
        results[number] = work[number]()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(work))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(deadline - time.monotonic())
        assert not thread.is_alive()
    return results


def test_speed_is_measured_and_a_device_without_memory_is_a_local_fault() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Rank(store.port, "both", number, 2, message_bytes=4 * MIB) for number in range(2)]
    for link in all_reduce(ranks):
        assert (link.error, link.local) == ("", False)
        assert 0.001 < link.gib_per_second < 1000
    [link] = all_reduce([Rank(store.port, "large", 0, 1, message_bytes=2**60)])
    assert link.local
    assert "memory" in link.error


def test_a_process_that_dies_or_hangs_is_a_local_fault_and_its_peers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "KILL_MARGIN_SECONDS", 2.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    signals = {signal.SIGKILL: "killed by SIGKILL", signal.SIGSTOP: "not finish"}
    pairs = [[Rank(store.port, f"{number}", rank, 2, seconds=3.0) for rank in range(2)] for number in signals]
    ranks = [pair[0] for pair in pairs] + [Stopped(pair[1], n) for pair, n in zip(pairs, signals, strict=True)]
    *good, dead, stopped = [link for [link] in together(*(partial(all_reduce, [rank]) for rank in ranks))]
    for bad, says in zip((dead, stopped), signals.values(), strict=True):
        assert bad.local
        assert says in bad.error
    assert all(link.error and not link.local for link in good)


class Stopped(Rank):
    """A rank whose process gets a signal as soon as it has read what it is to do."""

    def __init__(self, rank: Rank, number: int) -> None:
        super().__init__(**vars(rank))
        object.__setattr__(self, "number", int(number))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        os.kill(os.getpid(), state["number"])


def nodes_of(tmp_path: Path, *names: str, **options: Any) -> list[NodeNetwork]:
    size = {"processes": 2, "message_bytes": 4 * MIB, **options}
    return [NodeNetwork(name, names, "127.0.0.1", tmp_path / "port", **size) for name in names]


def by_name(lines: Iterable[CheckResult]) -> dict[str, CheckResult]:
    return {each.name: each for each in lines}


def test_nodes_measure_links_and_an_all_reduce_without_a_bad_one(tmp_path: Path) -> None:
    first, second, third = nodes_of(tmp_path, "n1", "n2", "n3")
    found = together(
        lambda: by_name(first.check(True)), lambda: by_name(second.check(False)), lambda: by_name(third.check(True))
    )
    assert not [line for lines in found for line in lines.values() if line.status == "failed"]
    for lines, other in ((found[0], "n3"), (found[2], "n1")):
        for name in (f"link {other}", "all-reduce of all"):
            assert lines[name].value > 0
        assert abs(lines["clock"].value) < 1.5
    assert not [name for name in found[1] if name.startswith("link") or name == "all-reduce of all"]


def test_a_wrong_clock_and_a_slow_link_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = nodes_of(tmp_path, "n1", "n2", "n3", processes=1, min_gib_per_second=1e6)
    gather = third._gather
    monkeypatch.setattr(third, "_gather", lambda stage, value: gather(stage, value - 5 if stage == "clock" else value))
    found = together(*(lambda each=each: by_name(each.check(True)) for each in (first, second, third)))  # type: ignore[misc]
    assert "differs by +5.0 s" in found[2]["clock"].note or "differs by +4.9 s" in found[2]["clock"].note
    assert found[0]["clock"].status == "passed"
    assert "link n2" not in found[0]  # of two nodes, the first passes
    assert "below 1e+06" in found[1]["link n1"].note


def test_an_absent_first_node_fails_the_network_of_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "GATHER_SECONDS", 2.0)
    first, second, third = nodes_of(tmp_path, "n1", "n2", "n3", processes=1)
    [line] = second.check(True)
    assert (line.name, line.status) == ("network", "failed")
    assert "n1 (127.0.0.1)" in line.note
    assert "within 2 s" in line.note
    found = together(lambda: by_name(first.check(True)), lambda: by_name(third.check(True)))
    assert found[0]["link n3"].value > 0
    assert found[1]["all-reduce of all"].value > 0
    [line] = second.check(True)  # too late
    assert (line.name, line.status) == ("network", "failed")
    assert "did not wait for this node" in line.note


def test_reports_are_written_for_the_choice_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}", "run.name=run"])
    report_folder(config).mkdir(parents=True)

    def check(*_: object) -> str:
        raise CheckFailed("it shows nothing")

    monkeypatch.setattr(node, "CHECKS", {"browser": check, "caches": lambda *_: "on nfs"})
    check_node(config, "n1", ["n1"], "127.0.0.1")
    assert bad_nodes(config, ["n1", "n2"]) == {
        "n1": "browser: it shows nothing",
        "n2": "its check did not finish; search the job's log for its name",
    }
    assert json.loads((report_folder(config) / "n1.json").read_text())["results"][0]["section"] == "n1"
    with pytest.raises(ConfigError, match=r"node n9 .* is not one of n1, n2"):
        check_node(config, "n9", ["n1", "n2"], "127.0.0.1")
