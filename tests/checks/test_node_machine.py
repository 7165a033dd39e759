"""The machine against what the packages and cluster.* ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_webrl.checks.node import cache_folders, cache_problem, read_topology, topology_problems
from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.load import parse_config

MOUNTS = "/dev/sda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/me/local tmpfs rw 0 0\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sysfs of two NUMA nodes of four cores, two GPUs and a network card, and the nvidia-smi of this machine."""
    for node, cores in enumerate(("0-3", "4-7")):
        folder = tmp_path / "sys/devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for gpu, node in enumerate((0, 1)):
        folder = tmp_path / "sys/bus/pci/devices" / f"0000:0{gpu}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0, GPU-a, 00000000:00:00.0\\n1, GPU-b, 00000000:01:00.0\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "sys"


def test_the_topology_is_read_from_kernel_and_driver(machine: Path) -> None:
    found = read_topology(machine)
    assert found.numa_cores == (frozenset(range(4)), frozenset(range(4, 8)))
    assert found.gpu_numa == (0, 1)
    assert found.nics == ["mlx5_0"]


@pytest.mark.parametrize("visible", ["1", "GPU-b", " 1 "])
def test_only_visible_gpus_count(machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = read_topology(machine)
    assert found.gpu_numa == (1,)
    assert list(topology_problems(ClusterConfig(gpus_per_node=1), found)) == []
    assert "1 GPUs are visible" in next(topology_problems(ClusterConfig(gpus_per_node=2), found))


def test_each_visible_mig_device_counts(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
  MIG 3g.40gb     Device  0: (UUID: MIG-a0)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)
  MIG 3g.40gb     Device  0: (UUID: MIG-b0)
  MIG 3g.40gb     Device  1: (UUID: MIG-b1)"""
    program = tmp_path / "bin" / "nvidia-smi"
    rows = program.read_text().removeprefix("#!/bin/sh\n")
    program.write_text(f"#!/bin/sh\nif [ $1 = --list-gpus ]; then echo '{listed}'; exit; fi\n{rows}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b1,MIG-a0,MIG-b0,0,GPU-b")
    assert read_topology(machine).gpu_numa == (1, 0, 1, 0, 1)


def test_more_gpus_than_the_configuration_uses_are_no_problem(machine: Path) -> None:
    assert not list(topology_problems(ClusterConfig(gpus_per_node=1), read_topology(machine)))


def test_a_configuration_that_describes_the_machine_has_no_problem(machine: Path) -> None:
    cluster = ClusterConfig(gpus_per_node=2, numa_cores=["0-3", "4-7"], gpu_numa=[0, 1], nics=["mlx5_0", "mlx5_0"])
    assert not list(topology_problems(cluster, read_topology(machine)))


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        (ClusterConfig(numa_cores=["0-55"]), r"numa_cores\[0\]=0-55: the machine has no core 8"),
        (ClusterConfig(numa_cores=["0-7"]), r"numa_cores\[0\]=0-7 spans NUMA nodes, which are 0-3; 4-7"),
        (ClusterConfig(gpus_per_node=8), "cluster.gpus_per_node=8, but 2 GPUs are visible"),
        (
            ClusterConfig(gpus_per_node=2, numa_cores=["4-7", "0-3"]),
            "GPU 0 is at NUMA node 0, but cluster.gpu_numa puts it at the cores 4-7",
        ),
        (ClusterConfig(gpus_per_node=2, nics=["mlx5_0", "mlx5_7"]), "cluster.nics names mlx5_7, but the machine has"),
    ],
)
def test_a_mismatched_topology_is_named(machine: Path, cluster: ClusterConfig, problem: str) -> None:
    found = list(topology_problems(cluster, read_topology(machine)))
    assert found
    assert re.search(problem, found[0]), found


def test_caches_are_those_that_roles_get(tmp_path: Path) -> None:
    config = parse_config(None, ["model.platform=cuda"])
    inherited = {"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/raid/triton"}
    found = cache_folders(config, inherited)
    assert found["TRITON_CACHE_DIR"] == "/raid/triton"
    assert Path(found["VLLM_CACHE_ROOT"]).is_relative_to(tmp_path)
    assert found["TMPDIR"] == str(tmp_path)


def test_a_cache_on_a_shared_file_system_is_named() -> None:
    assert "is on nfs4" in cache_problem("TRITON_CACHE_DIR", "/home/me/.triton", MOUNTS)
    assert cache_problem("TRITON_CACHE_DIR", "/home/me/local/triton", MOUNTS) == ""
    assert cache_problem("TRITON_CACHE_DIR", "/scratch/triton", MOUNTS) == ""
