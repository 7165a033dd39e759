"""The attention kernel of a device, and the call of PyTorch's variable-length kernel on fake CUDA tensors."""

from __future__ import annotations

import subprocess
import sys

import torch

from megatron_webrl.model.vision_language.attention import select_kernel

FAKE_CALL = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from megatron_webrl.model.vision_language.attention import select_kernel
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams

with FakeTensorMode(), torch.no_grad():
    query, key = (torch.empty(128, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    boundaries = torch.empty(4, dtype=torch.int32, device="cuda")
    params = MultimodalPackedSeqParams(
        qkv_format="sbhd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, segment_boundaries=(0, 60, 100, 128)
    )
    kernel = select_kernel("auto", query)
    output = kernel(query, key, key, params, 0.125)
    print(kernel.__name__, tuple(output.shape), output.dtype, output.device.type)
    print(select_kernel("auto", query.float()).__name__)
"""


def test_half_precision_on_cuda_takes_the_variable_length_kernel():
    """In a process of its own: the CPU platform of the tests redirects CUDA tensors to the CPU."""
    done = subprocess.run([sys.executable, "-c", FAKE_CALL], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["varlen (128, 8, 64) torch.bfloat16 cuda", "per_segment"], done.stderr


def test_the_cpu_takes_one_call_per_segment():
    for dtype in (torch.float32, torch.bfloat16):
        assert select_kernel("auto", torch.empty(1, dtype=dtype)).__name__ == "per_segment"
