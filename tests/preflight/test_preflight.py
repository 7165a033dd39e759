"""Node checks before a job: each one passes on this machine, and fails with a reason that names the fault."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from megatron_webrl.cluster.placement import place_processes
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.preflight import local_checks, node_report
from megatron_webrl.preflight.local_checks import CheckFailed
from megatron_webrl.preflight.network_checks import (
    LOCAL_STAGE,
    NetworkCheckGroup,
    check_links,
    clock_offset,
    clock_server,
    measure_all_reduce,
    pair_rounds,
)
from megatron_webrl.preflight.node_check import NodeCheck
from megatron_webrl.preflight.node_report import bad_nodes
from megatron_webrl.slurm.prepare import choose_nodes

pytestmark = pytest.mark.alone  # it needs free ports and measures speeds


def made(*overrides: str) -> Config:
    return parse_config(None, list(overrides))


def look(check: str, *overrides: str) -> None:
    config = made(*overrides)
    local_checks.CHECKS[check](config, place_processes(config))


def script(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


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


def stores(count: int) -> list[TCPStore]:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False) for _ in range(count - 1)]
    return [host, *others]


# -- checks of one node -------------------------------------------------------------------------------


def test_the_software_check_runs_the_doctor() -> None:
    look("software")


def test_a_package_that_does_not_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise ImportError('built for another machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CheckFailed, match=r"missing torchvision; run `webrl doctor` on the node for details"):
        look("software")


def test_shared_memory_must_hold_the_ring_and_the_image_buffers(tiny_model: Path) -> None:
    model = f"model.path={tiny_model}"
    look("shared memory", model, "ring.capacity_mib=1")
    with pytest.raises(CheckFailed, match=r"ring.capacity_mib and the image buffers of 1 trainer ranks need 100000512"):
        look("shared memory", model, "ring.capacity_mib=100000000")


def test_chromium_shows_a_page() -> None:
    look("browser")


def test_a_browser_that_shows_nothing_is_named(tmp_path: Path) -> None:
    program = script(tmp_path, "echo a library is missing >&2; exit 127")
    with pytest.raises(CheckFailed, match=r"program loads no page: a library is missing"):
        look("browser", f"browser.executable={program}")
    with pytest.raises(CheckFailed, match=r"browser.executable=/nowhere"):
        look("browser", "browser.executable=/nowhere")


def test_browsers_of_a_farm_are_not_checked() -> None:
    look("browser", "browser.executable=/nowhere", "browser.farm=http://head:8701")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CheckFailed, match=rf"port {port} is not free"):
            look("ports", f"cluster.base_port={port}")
        with pytest.raises(CheckFailed, match=rf"port {port} is not free"):
            look("ports", f"cluster.base_port={port - 1}")
    look("ports", f"cluster.base_port={port}")


def test_cores_that_the_job_may_not_use_are_named() -> None:
    mine = sorted(os.sched_getaffinity(0))
    look("cores", f'cluster.numa_cores=["{mine[0]},{mine[-1]}"]')
    with pytest.raises(CheckFailed, match=r"100 cores of cluster.numa_cores, core 5000 first, are not among the"):
        look("cores", 'cluster.numa_cores=["5000-5099"]')


GPUS = ("cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1")


def test_the_number_and_memory_of_gpus_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    look("gpus")  # the configuration has none
    local_checks.check_gpu_memory(made(*GPUS), ["81559", "81559"])
    with pytest.raises(CheckFailed, match=r"1 GPUs, but cluster.gpus_per_node=2"):
        local_checks.check_gpu_memory(made(*GPUS), ["81559"])
    with pytest.raises(CheckFailed, match=r"a GPU has 40960 MiB, but cluster.gpu_gib=80"):
        local_checks.check_gpu_memory(made(*GPUS), ["81559", "40960"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CheckFailed, match=r"cluster.gpus_per_node=2, but nvidia-smi is not installed"):
        look("gpus", *GPUS)


# -- checks of all nodes together ---------------------------------------------------------------------


def test_a_clock_difference_is_named() -> None:
    with clock_server() as port:
        assert abs(clock_offset("127.0.0.1", port, "n1")) < 0.5
    with (
        clock_server(lambda: time.time() + 5) as port,
        pytest.raises(CheckFailed, match=r"differs by \+5.0 s from .* n1"),
    ):
        clock_offset("127.0.0.1", port, "n1")
    with pytest.raises(CheckFailed, match=r"n1 .* did not report its time"):
        clock_offset("127.0.0.1", port, "n1")


@pytest.mark.parametrize("count", range(1, 20))
def test_a_round_contains_each_member_at_most_once(count: int) -> None:
    found = pair_rounds(count)
    for pairs in found:
        everyone = [each for pair in pairs for each in pair]
        assert len(everyone) == len(set(everyone))
    edges = {frozenset(pair) for pairs in found for pair in pairs}
    assert edges == {frozenset((i, (i + 1) % count)) for i in range(count) if count > 1}


def test_an_all_reduce_returns_its_speed() -> None:
    names = ["n1", "n2", "n3"]
    found = together([lambda s=s, i=i: measure_all_reduce(s, names, i, False) for i, s in enumerate(stores(3))])  # type: ignore[misc]
    assert all(0.01 < speed < 1000 for speed in found), found


def test_an_all_reduce_without_one_of_its_members_names_them() -> None:
    with pytest.raises(CheckFailed, match=r"all-reduce with n2, n3 failed"):
        measure_all_reduce(stores(1)[0], ["n1", "n2", "n3"], 0, False, seconds=2)


def test_a_node_that_fails_with_both_neighbours_is_at_fault() -> None:
    names = ["n1", "n2", "n3", "n4"]
    here = [each for each in enumerate(stores(4)) if each[0] != 2]  # n3 is absent
    found = together([lambda s=s, i=i: check_links(s, names, i, False, 0.0, seconds=4) for i, s in here])  # type: ignore[misc]
    assert [sorted(each) for each in found] == [["n2", "n4"], ["n1"], ["n1"]]


def test_links_that_are_too_slow_are_named() -> None:
    found = together([lambda s=s, i=i: check_links(s, ["n1", "n2"], i, False, 1e6) for i, s in enumerate(stores(2))])  # type: ignore[misc]
    assert list(found[0]) == ["n2"]  # of two nodes, the first passes
    assert isinstance(found[1], CheckFailed)
    assert "GiB/s with n1, below 1e+06" in str(found[1])


def test_a_node_that_cannot_reach_the_first_one_fails(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"n1 did not start the network check within 1 s"):
        NetworkCheckGroup.join(1, ["n1", "n2"], "127.0.0.1", tmp_path / "meeting", seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "meeting").write_text(str(server.getsockname()[1]))
    with pytest.raises(CheckFailed, match=r"no connection to n1 \(127.0.0.1\) within 2 s"):
        NetworkCheckGroup.join(1, ["n1", "n2"], "127.0.0.1", tmp_path / "meeting", seconds=2)


def test_an_absent_node_is_no_member(tmp_path: Path) -> None:
    names = ["n1", "n2", "n3"]
    path = tmp_path / "meeting"

    def take_part(number: int) -> list[int]:
        meeting = NetworkCheckGroup.join(number, names, "127.0.0.1", path)
        try:
            return meeting.passed_members(LOCAL_STAGE, True, seconds=3)
        finally:
            meeting.leave()

    assert together([lambda: take_part(0), lambda: take_part(2)]) == [[0, 2], [0, 2]]


def test_nodes_check_each_other_and_write_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_checks, "CHECKS", {})
    monkeypatch.setattr("megatron_webrl.preflight.node_check.CHECKS", {})  # tested above
    config = made(f"run.directory={tmp_path}", "run.name=run")
    node_report.report_folder(config).mkdir(parents=True)
    names = ["n1", "n2", "n3"]
    checks = [NodeCheck(config, name, names, "127.0.0.1") for name in names]
    checks[1].report.failed_checks["browser"] = "shows nothing"
    for found in together([check.run for check in checks]):
        assert found.failed_checks == ({"browser": "shows nothing"} if found.node == "n2" else {})
    assert bad_nodes(config, [*names, "n4"]) == {
        "n2": "browser: shows nothing",
        "n4": "its check did not finish; search the job's log for its name",
    }
    figures = json.loads((node_report.report_folder(config) / "n3.json").read_text())["measurements"]
    assert figures["all-reduce of all, GiB/s"] > 0
    assert figures["link n1, GiB/s"] > 0
    assert abs(figures["clock, seconds"]) < 0.5


def test_a_node_of_another_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"node n9 .* is not one of n1, n2"):
        NodeCheck(made(), "n9", ["n1", "n2"], "127.0.0.1")


# -- choice of nodes ----------------------------------------------------------------------------------


def test_good_nodes_are_chosen_in_their_order() -> None:
    config = made("cluster.nodes=2", "trainer.data_parallel=2", "rollout.engines=2")
    assert choose_nodes(config, ["n1", "n2", "n3"], {}) == ["n1", "n2"]
    assert choose_nodes(config, ["n1", "n2", "n3"], {"n1": "clock: off"}) == ["n2", "n3"]
    refusal = r"1 of 3 nodes passed the check, .* n1: clock: off; n3: ports: .*--exclude=n1,n3"
    with pytest.raises(ConfigError, match=refusal):
        choose_nodes(config, ["n1", "n2", "n3"], {"n1": "clock: off", "n3": "ports: taken"})
