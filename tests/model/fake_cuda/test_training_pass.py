"""A training pass on CUDA mixes no devices, and waits for the device only where HOST_SYNCS says so.

At each entry the device idles until the host has read a value and launched the next kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

METRICS = {"megatron_webrl/trainer/learner.py:_reduce device to host": 1}  # once for all micro-batches
HOST_SYNCS = {
    "pixels": {},
    "dense score": {},
    "dense train": METRICS,
    "moe score": {},
    "moe train": METRICS,
    **{f"dense {name}": METRICS for name in ("gspo", "cispo", "sapo", "dppo", "raft_plus_plus", "teacher", "critic")},
    "dense critic score": {},
    # Once an update, before its first step, for all micro-batches.
    "dense critic credit": {"megatron_webrl/trainer/credit/step_critic.py:gather_values device to host": 1},
}


@pytest.fixture(scope="module")
def found(library: Path) -> dict[str, dict[str, int]]:
    """Host syncs by pass."""
    command = [sys.executable, "-m", "tests.model.fake_cuda.training_pass", str(library), str(library.parent)]
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    syncs: dict[str, dict[str, int]] = json.loads(done.stdout)
    return syncs


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """device.cpp as a shared library."""
    if torch.version.cuda is not None:
        pytest.skip("needs torch's CPU build: the CUDA build registers a device of its own")
    folder = tmp_path_factory.mktemp("fake_cuda")
    compiler, torch_folder = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        pytest.skip("needs g++")
    source, library = Path(__file__).with_name("device.cpp"), folder / "device.so"
    libraries = [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder}/include", str(source)]
    subprocess.run([*command, "-o", str(library), *libraries], check=True, timeout=300)
    return library


def test_each_kind_of_host_sync_is_found(found: dict[str, dict[str, int]]) -> None:
    kinds = {"device to host": 2, "shape from values": 1, "host to device": 2, "synchronize": 1}
    assert found["each kind"] == {f"elsewhere {kind}": count for kind, count in kinds.items()}


@pytest.mark.parametrize("name", HOST_SYNCS)
def test_a_pass_waits_for_the_device_only_where_listed(found: dict[str, dict[str, int]], name: str) -> None:
    assert found[name] == HOST_SYNCS[name]
