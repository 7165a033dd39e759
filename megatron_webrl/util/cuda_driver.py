"""GPUs of this machine, and whether its NVIDIA driver fits the CUDA that torch was built for.

Without a library in this process: torch takes seconds to import.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of NVIDIA's driver on Linux, of Windows' in WSL
NVIDIA_SMI_SECONDS = 60.0
TORCH_SECONDS = 120.0
ASK_TORCH = "import torch; print(torch.cuda.is_available(), torch.version.cuda or '')"


@dataclass(frozen=True)
class CudaDriver:
    """What the driver reports."""

    version: str  # of the kernel module, such as "570.86.15"
    api_version: int | None  # CUDA version of libcuda.so.1: 1000 x major + 10 x minor; None: it does not load


class NvidiaSmiError(RuntimeError):
    """nvidia-smi is missing or fails. The message gives the reason."""


def has_gpu() -> bool:
    """Whether this machine, or container, has a GPU with a driver."""
    return any(file.exists() for file in DEVICE_FILES)


def query_gpus(fields: str) -> list[list[str]]:
    """Values of nvidia-smi's `fields`, comma-separated, for each GPU. Raises NvidiaSmiError."""
    lines = _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
    return [[value.strip() for value in line.split(",")] for line in lines if line.strip()]


def _nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi writes. Raises NvidiaSmiError."""
    command = ["nvidia-smi", *arguments]
    if not shutil.which(command[0]):
        raise NvidiaSmiError("nvidia-smi is not installed; install the NVIDIA driver")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NvidiaSmiError(f"nvidia-smi did not finish within {NVIDIA_SMI_SECONDS:.0f} s; a GPU hangs") from None
    if done.returncode:
        raise NvidiaSmiError(f"nvidia-smi failed: {(done.stdout + done.stderr).strip()[:300]}")
    return done.stdout


def query_visible_gpus(fields: str) -> list[list[str]]:
    """As `query_gpus`, of the GPUs of CUDA_VISIBLE_DEVICES in its order, which nvidia-smi does not read. Unset: all.

    Each MIG device counts, with the values of its GPU.
    """
    rows, names = query_gpus(f"index,uuid,{fields}"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not names:
        return [row[2:] for row in rows]
    gpus = _gpus_of_mig_devices() if "MIG-" in names else {}
    chosen = [gpus.get(name, name) for name in map(str.strip, names.split(","))]
    return [row[2:] for name in chosen for row in rows if name == row[0] or row[1].startswith(name)]


def _gpus_of_mig_devices() -> dict[str, str]:
    """UUID of the GPU by that of each MIG device, which nvidia-smi lists below its GPU. Raises NvidiaSmiError."""
    gpus, gpu = {}, ""
    for uuid in re.findall(r"UUID: ([^)\s]+)", _nvidia_smi("--list-gpus")):
        if uuid.startswith("MIG-"):
            gpus[uuid] = gpu
        else:
            gpu = uuid
    return gpus


def find_driver() -> CudaDriver:
    """The driver of this machine. Raises NvidiaSmiError without one."""
    rows = query_gpus("driver_version")
    if not rows:
        raise NvidiaSmiError("nvidia-smi lists no GPU")
    return CudaDriver(rows[0][0], _api_version())


def lists_gpus() -> bool:
    """Whether nvidia-smi lists a GPU."""
    try:
        return bool(query_gpus("driver_version"))
    except NvidiaSmiError:
        return False


def find_cuda_problem() -> str:
    """Why torch cannot use the GPUs of this machine; empty if it can. A process of its own imports torch."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"torch did not find the GPUs within {TORCH_SECONDS:.0f} s; a GPU hangs"
    if done.returncode:
        return f"torch does not import: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"
    available, _, cuda = done.stdout.strip().partition(" ")
    if available == "True":
        return ""
    try:
        driver = find_driver()
    except NvidiaSmiError as error:
        return f"torch sees no GPU: {error}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return driver_problem(cuda or None, driver) or (
        f"torch sees no GPU, although driver {driver.version} serves its CUDA {cuda}; "
        + ("look into `dmesg`" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r} may hide them")
    )


def torch_cuda_version() -> str | None:
    """The CUDA version that torch was built for, such as "13.0"; None for a CPU build. Raises ImportError."""
    import torch

    return torch.version.cuda


def driver_problem(cuda: str | None, driver: CudaDriver) -> str:
    """Why torch, built for CUDA version `cuda` (None: for CPUs), cannot use the driver; empty if it can.

    All minor versions run on a driver of the same major version.
    https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    """
    if cuda is None:
        return f"torch is built for CPUs, but the machine has GPUs (driver {driver.version}); install its CUDA build"
    if driver.api_version is None:
        return f"driver {driver.version} is installed, but libcuda.so.1 does not load; make it visible here"
    if driver.api_version // 1000 >= int(cuda.partition(".")[0]):
        return ""
    api = f"{driver.api_version // 1000}.{driver.api_version % 1000 // 10}"
    return (
        f"libcuda.so.1 of driver {driver.version} serves CUDA {api}, but torch is built for CUDA {cuda}; update the "
        f"driver, load forward compatibility (package cuda-compat-{cuda.replace('.', '-')}, its folder first in "
        "LD_LIBRARY_PATH, without an older one), or install a torch built for an older CUDA"
    )


def _api_version() -> int | None:
    """CUDA version of the libcuda.so.1 that the dynamic loader finds, which torch loads too."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else version.value
