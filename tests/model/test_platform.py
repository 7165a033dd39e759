"""The CPU platform replaces CUDA. It patches torch, so it runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REFUSALS = """
import torch
from megatron_webrl.model import platform

def refused(name, kind, message):
    try:
        platform.activate(name)
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(name)

refused("tpu", ValueError, "not one of")
refused("cuda", RuntimeError, "sees no GPU; use platform=cpu")
platform.activate("cpu")
refused("cuda", RuntimeError, "already uses cpu")
"""

REDIRECTS = """
first = platform.activate("auto")
assert first == platform.activate("cpu") == platform.activate("auto")
assert (first.name, first.backend, first.device) == ("cpu", "gloo", torch.device("cpu"))
for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.cuda.current_device()):
    assert torch.zeros(2, device=device).device.type == "cpu"
x = torch.ones(3)
assert x.cuda() is x and x.to("cuda").device.type == "cpu" and x.to(device="cuda").device.type == "cpu"
assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
assert x.type(torch.int32).dtype is torch.int32
stream = torch.cuda.Stream(device=torch.cuda.current_device())
with torch.cuda.stream(stream):
    stream.wait_stream(torch.cuda.default_stream())
    torch.cuda.current_stream().wait_event(stream.record_event())
torch.cuda.synchronize()
assert not torch.cuda.is_current_stream_capturing()
"""

RANDOM_STATES = """
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
torch.manual_seed(1)
before = torch.get_rng_state()
tracker = CudaRNGStatesTracker()
tracker.add("a", 5)
assert torch.equal(before, torch.get_rng_state())
with tracker.fork("a"):
    one = torch.rand(3)
with tracker.fork("a"):
    two = torch.rand(3)
assert torch.equal(before, torch.get_rng_state())
torch.manual_seed(5)
assert torch.equal(torch.cat([one, two]), torch.cat([torch.rand(3), torch.rand(3)]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: auto means CUDA")
def test_the_cpu_platform_stands_in_for_cuda() -> None:
    code = REFUSALS + REDIRECTS + RANDOM_STATES
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr


BROKEN_TRANSFORMER_ENGINE = """
import logging

import torch

from megatron_webrl.model import platform

logging.basicConfig(format="%(levelname)s %(message)s")
cpu = platform.activate("cpu")
from megatron.core import fp8_utils, optimizer
from megatron_webrl.model.build import build_model
from megatron_webrl.model.compute_options import ComputeOptions, MissingLibraryError

assert not fp8_utils.HAVE_TE and optimizer.Adam is torch.optim.AdamW
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
try:
    build_model("", dtype="float32", platform=cpu, options=ComputeOptions(layers="transformer_engine"))
except MissingLibraryError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_transformer_engine_that_does_not_import_counts_as_absent(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    reason = "libcudnn.so.9: cannot open shared object file"
    (package / "__init__.py").write_text("from transformer_engine import version\n")
    (package / "version.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text(f"raise OSError('{reason}')\n")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_TRANSFORMER_ENGINE], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    warning = f"WARNING Transformer Engine is installed but does not import, and is not used: OSError: {reason}"
    assert done.stderr.count(warning) == 1
    assert done.stdout == f"layers=transformer_engine: it is installed but does not import: OSError: {reason}\n"
