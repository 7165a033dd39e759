"""The NVIDIA driver, packages that settings name, and the limits of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_webrl.checks.node import check_gpus
from megatron_webrl.checks.report import CheckFailed
from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.util import cuda_driver
from megatron_webrl.util.cuda_driver import (
    CudaDriver,
    NvidiaSmiError,
    driver_problem,
    find_driver,
    query_gpus,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        ("13.0", CudaDriver("580.65.06", 13000), []),
        ("13.2", CudaDriver("580.65.06", 13000), []),  # minor version compatibility
        ("12.8", CudaDriver("580.65.06", 13000), []),  # backward compatibility
        ("13.0", CudaDriver("570.86.15", 13000), []),  # forward compatibility
        ("13.0", CudaDriver("570.86.15", 12080), ["driver 570.86.15 serves CUDA 12.8", "cuda-compat-13-0"]),
        ("13.0", CudaDriver("580.65.06", None), ["libcuda.so.1 does not load"]),
        (None, CudaDriver("580.65.06", 13000), ["torch is built for CPUs", "580.65.06"]),
    ],
)  # fmt: skip
def test_the_driver_must_serve_the_cuda_of_torch(cuda: str | None, driver: CudaDriver, words: list[str]) -> None:
    problem = driver_problem(cuda, driver)
    assert bool(problem) == bool(words)
    assert all(word in problem for word in words), problem


def nvidia_smi(folder: Path, text: str) -> None:
    """A program of that name, as this machine has none."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_the_driver_is_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NvidiaSmiError, match="nvidia-smi is not installed"):
        find_driver()
    nvidia_smi(tmp_path, 'echo "570.86.15, 81559"; echo "570.86.15, 81559"')
    assert query_gpus("driver_version,memory.total") == [["570.86.15", "81559"]] * 2
    assert find_driver().version == "570.86.15"
    nvidia_smi(tmp_path, "echo 'Unable to determine the device handle' >&2; exit 15")
    with pytest.raises(NvidiaSmiError, match="nvidia-smi failed: Unable to determine the device handle"):
        find_driver()
    nvidia_smi(tmp_path, "exit 0")
    with pytest.raises(NvidiaSmiError, match="nvidia-smi lists no GPU"):
        find_driver()


def test_a_node_of_gpus_with_a_torch_for_cpus_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "echo 0, GPU-a, 81559; echo 1, GPU-b, 81559"
    nvidia_smi(tmp_path, f"case $1 in *memory*) {rows};; *) echo 580.65.06; echo 580.65.06;; esac")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cuda_driver, "torch_cuda_version", lambda: None)  # the tests' own torch may be for CUDA
    config = parse_config(None, ["cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1"])
    with pytest.raises(CheckFailed, match=r"torch is built for CPUs, but the machine has GPUs .driver 580.65.06"):
        check_gpus(config, place_processes(config))
