"""Checks of a node by itself: each one passes on this machine, and fails with a reason that names the fault."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_webrl.checks import node
from megatron_webrl.checks.node import CHECKS, file_system, needed_open_files
from megatron_webrl.checks.processes import Outcome
from megatron_webrl.checks.report import CheckFailed, failed, measured
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control.child_process import MAX_OPEN_FILES, start_process
from megatron_webrl.launch import gpus
from megatron_webrl.placement.placement import place_processes
from tests.waiting import write_program

ROOT = Path(__file__).parents[2]


def made(*overrides: str) -> Config:
    return parse_config(None, list(overrides))


def look(check: str, *overrides: str) -> None:
    config = made(*overrides)
    CHECKS[check](config, place_processes(config))


# -- checks of one node -------------------------------------------------------------------------------


def test_a_package_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [measured("installation", "torch", "2.13"), failed("installation", "torchvision", "does not import")]
    monkeypatch.setattr(node, "run_processes", lambda *_: [Outcome(lines)])
    with pytest.raises(CheckFailed, match=r"missing torchvision; run `webrl check` on the node for details"):
        look("software")
    monkeypatch.setattr(node, "run_processes", lambda *_: [Outcome(lines[:1], "its process killed by SIGSEGV")])
    with pytest.raises(CheckFailed, match=r"killed by SIGSEGV; run `webrl check`"):
        look("software")
    with pytest.raises(CheckFailed, match=r"needs the package transformer_engine"):
        look("software", "trainer.layers=transformer_engine", "trainer.attention=flash")


def test_shared_memory_must_hold_the_ring() -> None:
    look("shared memory", "ring.capacity_mib=1")
    with pytest.raises(CheckFailed, match=r"/dev/shm has \d+ MiB free, but ring.capacity_mib needs 100000000"):
        look("shared memory", "ring.capacity_mib=100000000")


def test_a_browser_that_shows_nothing_is_named(tmp_path: Path) -> None:
    look("browser")
    look("browser", "browser.executable=/nowhere", "browser.servers=http://head:8701")  # theirs are not checked
    program = write_program(tmp_path / "program", "echo a library is missing >&2; exit 127")
    with pytest.raises(CheckFailed, match=r"program loads no page: a library is missing"):
        look("browser", f"browser.executable={program}")


def has_ports(base: int) -> bool:
    try:
        look("ports", f"cluster.base_port={base}")
    except CheckFailed:
        return False
    return True


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for base in (port, port - 1):
            with pytest.raises(CheckFailed, match=rf"port {port} is not free"):
                look("ports", f"cluster.base_port={base}")
    assert any(has_ports(base) for base in range(20_000, 30_000, 500))  # the system gives others to clients


def test_cores_that_the_job_may_not_use_are_named() -> None:
    mine = sorted(os.sched_getaffinity(0))
    look("cores", f'cluster.numa_cores=["{mine[0]},{mine[-1]}"]')
    with pytest.raises(CheckFailed, match=r"100 cores of cluster.numa_cores, core 5000 first, are not among the"):
        look("cores", 'cluster.numa_cores=["5000-5099"]')


GPUS = ("cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1")


def test_number_and_memory_of_gpus_and_the_driver_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look("gpus")  # the configuration has none
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckFailed, match=r"cluster.gpus_per_node=2, but nvidia-smi is not installed"):
        look("gpus", *GPUS)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "find_cuda_problem", lambda: "the driver is too old")
    for sizes, reason in (
        (["81559"], "1 GPUs, but cluster.gpus_per_node=2"),
        (["81559", "40960"], "a GPU has 40960 MiB, but cluster.gpu_gib=80"),
        (["81559", "81559"], "the driver is too old"),
    ):
        rows = "; ".join(f"echo {number}, GPU-{number}, {mib}" for number, mib in enumerate(sizes))
        write_program(tmp_path / "nvidia-smi", f"case $1 in *memory*) {rows};; *) echo 580.65.06;; esac")
        with pytest.raises(CheckFailed, match=reason):
            look("gpus", *GPUS)


LIMITS = """
import sys
from pathlib import Path
from megatron_webrl.checks import node
from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.placement import place_processes
config, node.INFINIBAND_DEVICES = parse_config(None, sys.argv[2:]), Path(sys.argv[1])
try: node.check_limits(config, place_processes(config))
except node.CheckFailed as error: print(error)
"""


def test_a_low_limit_of_open_files_or_of_memory_for_infiniband_is_named(tmp_path: Path) -> None:
    def limited(shell: str, *overrides: str) -> str:
        """What the check says in a process with limits that `shell` sets, and cards as the files of the folder."""
        command = ["bash", "-c", f'{shell}; exec "$@"', "-", sys.executable, "-c", LIMITS, str(tmp_path), *overrides]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    config = made()
    needed = needed_open_files(config, place_processes(config))
    assert 1024 < needed < 4096
    assert limited(f"ulimit -n {needed}; ulimit -l 64", *GPUS) == ""  # without cards
    (tmp_path / "mlx5_0").touch()
    assert "may lock 64 KiB of memory (ulimit -l), but InfiniBand (mlx5_0)" in limited("ulimit -l 64", *GPUS)
    files = limited(f"ulimit -n {needed - 1}")
    assert f"may open {needed - 1} files (ulimit -Hn), but one of this job may need {needed}" in files
    large = parse_config(ROOT / "configs" / "8b_32node.yaml")
    assert 3000 < needed_open_files(large, place_processes(large)) < MAX_OPEN_FILES


def test_a_role_starts_with_a_high_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        role = start_process([sys.executable, "-c", program], tmp_path / "log", {"PATH": "/usr/bin"}, "role")
        assert role.wait(30) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "log").read_text().strip() == str((min(hard, MAX_OPEN_FILES), hard))


def test_a_cache_on_a_file_system_of_all_nodes_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made()
    mounts = "/dev/sda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/me/local tmpfs rw 0 0\n"
    found = [file_system(Path(folder), mounts) for folder in ("/home/me/.triton", "/home/me/local/triton", "/raid")]
    assert found == ["nfs4", "tmpfs", "ext4"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert CHECKS["caches"](config, place_processes(config)) == ""
    monkeypatch.setattr(node, "file_system", lambda folder, _: "nfs4" if folder == tmp_path else "ext4")
    warning = CHECKS["caches"](config, place_processes(config))
    assert warning.endswith("set TRITON_CACHE_DIR to a local folder")


# -- choice of nodes ----------------------------------------------------------------------------------
