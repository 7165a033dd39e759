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

ROUTING = {  # of two mixture-of-experts layers
    "megatron/core/transformer/moe/moe_utils.py:permute shape from values": 4,
    "megatron/core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize synchronize": 2,
}
METRICS = {"megatron_webrl/trainer/learner.py:_reduce device to host": 2}  # once for all micro-batches
HOST_SYNCS = {
    "dense score": {},
    "dense train": METRICS,
    "moe score": ROUTING,
    "moe train": {**{place: 2 * count for place, count in ROUTING.items()}, **METRICS},  # recompute=full: twice
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Host syncs by pass."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    library = _compile(folder)
    command = [sys.executable, "-m", "tests.model.fake_cuda.training_pass", str(library), str(folder)]
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    syncs: dict[str, dict[str, int]] = json.loads(done.stdout)
    return syncs


def _compile(folder: Path) -> Path:
    """device.cpp as a shared library."""
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
