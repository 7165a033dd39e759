"""GPUs of this machine, and whether torch can use them; this process does not import torch, which takes seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of NVIDIA's driver on Linux, of Windows' in WSL
LIMIT_SECONDS = 120.0  # a GPU that hangs holds up every program that looks for it


class NvidiaSmiError(RuntimeError):
    """nvidia-smi is missing or fails. The message gives the reason."""


def has_gpu() -> bool:
    """Whether this machine, or container, has a GPU with a driver."""
    return any(file.exists() for file in DEVICE_FILES)


def query_gpus(fields: str) -> list[list[str]]:
    """Values of nvidia-smi's `fields` for each GPU of CUDA_VISIBLE_DEVICES, which nvidia-smi does not read. Unset: all.

    A MIG device has the values of the first GPU. Raises NvidiaSmiError.
    """
    command = ["nvidia-smi", f"--query-gpu=index,uuid,{fields}", "--format=csv,noheader,nounits"]
    if not shutil.which(command[0]):
        raise NvidiaSmiError("nvidia-smi is not installed; install the NVIDIA driver")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NvidiaSmiError(f"nvidia-smi did not finish within {LIMIT_SECONDS:.0f} s; a GPU hangs") from None
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not rows:
        raise NvidiaSmiError(f"nvidia-smi failed: {(done.stdout + done.stderr).strip()[:300] or 'it lists no GPU'}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(row[0] for row in rows)
    names = [rows[0][0] if name.startswith("MIG-") else name for name in map(str.strip, visible.split(","))]
    return [row[2:] for name in names for row in rows if name == row[0] or row[1].startswith(name)]


def find_cuda_problem() -> str:
    """Why torch cannot use the GPUs of this machine, in its own words; empty if it can."""
    command = [sys.executable, "-c", "import torch; torch.cuda.init()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"torch did not find the GPUs within {LIMIT_SECONDS:.0f} s; a GPU hangs"
    if not done.returncode:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
    return f"torch cannot use a GPU{where}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"
