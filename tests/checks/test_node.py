"""Node checks before a job: each one passes on this machine, and fails with a reason that names the fault."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron_webrl.checks.node import CHECKS, check_gpu_memory, check_locally
from megatron_webrl.checks.report import CheckFailed
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.slurm.prepare import choose_nodes
from megatron_webrl.placement.placement import place_processes

pytestmark = pytest.mark.alone  # it needs free ports and measures speeds


def made(*overrides: str) -> Config:
    return parse_config(None, list(overrides))


def look(check: str, *overrides: str) -> None:
    config = made(*overrides)
    CHECKS[check](config, place_processes(config))


def script(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# -- checks of one node -------------------------------------------------------------------------------


def test_the_software_check_looks_for_packages() -> None:
    look("software")


def test_a_package_that_does_not_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise ImportError('built for another machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CheckFailed, match=r"missing torchvision.*; run `webrl check` on the node for details"):
        look("software")


def test_shared_memory_must_hold_the_ring() -> None:
    look("shared memory", "ring.capacity_mib=1")
    with pytest.raises(CheckFailed, match=r"/dev/shm has \d+ MiB free, but ring.capacity_mib needs 100000000"):
        look("shared memory", "ring.capacity_mib=100000000")


def test_chromium_shows_a_page() -> None:
    look("browser")


def test_a_browser_that_shows_nothing_is_named(tmp_path: Path) -> None:
    program = script(tmp_path, "echo a library is missing >&2; exit 127")
    with pytest.raises(CheckFailed, match=r"program loads no page: a library is missing"):
        look("browser", f"browser.executable={program}")
    with pytest.raises(CheckFailed, match=r"browser.executable=/nowhere"):
        look("browser", "browser.executable=/nowhere")


def test_browsers_of_other_servers_are_not_checked() -> None:
    look("browser", "browser.executable=/nowhere", "browser.servers=http://head:8701")


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
    check_gpu_memory(made(*GPUS), ["81559", "81559"])
    with pytest.raises(CheckFailed, match=r"1 GPUs, but cluster.gpus_per_node=2"):
        check_gpu_memory(made(*GPUS), ["81559"])
    with pytest.raises(CheckFailed, match=r"a GPU has 40960 MiB, but cluster.gpu_gib=80"):
        check_gpu_memory(made(*GPUS), ["81559", "40960"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CheckFailed, match=r"cluster.gpus_per_node=2, but nvidia-smi is not installed"):
        look("gpus", *GPUS)


def test_each_check_is_a_line_with_its_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise CheckFailed("port 1 is not free")

    for name, check in (("cores", lambda *_: ""), ("topology", lambda *_: "gpu 3 is elsewhere"), ("ports", fail)):
        monkeypatch.setitem(CHECKS, name, check)
    config = made()
    lines = check_locally("n1", config, place_processes(config), ["cores", "topology", "ports"])
    assert [(each.name, each.status, each.note) for each in lines] == [
        ("cores", "passed", ""), ("topology", "passed", "gpu 3 is elsewhere"), ("ports", "failed", "port 1 is not free")

    ]  # fmt: skip


# -- choice of nodes ----------------------------------------------------------------------------------


def test_slow_nodes_are_chosen_only_if_others_are_too_few() -> None:
    config = made("cluster.nodes=2", "trainer.data_parallel=2", "rollout.engines=2")
    assert choose_nodes(config, ["n1", "n2", "n3"], {}, {"n1": "gpu 3 is slow"}) == ["n2", "n3"]
    assert choose_nodes(config, ["n1", "n2", "n3"], {"n3": "clock: off"}, {"n1": "gpu 3 is slow"}) == ["n1", "n2"]


def test_good_nodes_are_chosen_in_their_order() -> None:
    config = made("cluster.nodes=2", "trainer.data_parallel=2", "rollout.engines=2")
    assert choose_nodes(config, ["n1", "n2", "n3"], {}) == ["n1", "n2"]
    assert choose_nodes(config, ["n1", "n2", "n3"], {"n1": "clock: off"}) == ["n2", "n3"]
    refusal = r"1 of 3 nodes passed the check, .* n1: clock: off; n3: ports: .*--exclude=n1,n3"
    with pytest.raises(ConfigError, match=refusal):
        choose_nodes(config, ["n1", "n2", "n3"], {"n1": "clock: off", "n3": "ports: taken"})
