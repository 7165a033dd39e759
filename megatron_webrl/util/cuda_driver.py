"""Whether the NVIDIA driver of this machine fits the CUDA that torch was built for."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# First driver branch of each CUDA major version; all minor versions run on it (minor version compatibility).
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1
MINIMUM_DRIVERS = {11: 450, 12: 525, 13: 580}
NVIDIA_SMI_SECONDS = 60.0
TORCH_SECONDS = 120.0
ASK_TORCH = "import torch; print(torch.cuda.is_available(), torch.version.cuda or '')"


@dataclass(frozen=True)
class CudaDriver:
    """What the driver reports."""

    version: str  # of the kernel module, such as "570.86.15"
    api_version: int | None  # CUDA version of libcuda.so.1: 1000 x major + 10 x minor; None: it does not load
    library: str = "libcuda.so.1"  # path of the loaded library; in a folder "compat" it is a forward compatibility one


class NvidiaSmiError(RuntimeError):
    """nvidia-smi is missing or fails. The message gives the reason."""


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
    return CudaDriver(rows[0][0], *_load_library())


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
    """Why torch, built for CUDA version `cuda` (None: for CPUs), cannot use the driver; empty if it can."""
    if cuda is None:
        return f"torch is built for CPUs, but the machine has GPUs (driver {driver.version}); install its CUDA build"
    major = int(cuda.partition(".")[0])
    needed, found = MINIMUM_DRIVERS.get(major), int(driver.version.partition(".")[0])
    if driver.api_version is not None and driver.api_version // 1000 >= major:
        return ""  # an older kernel module serves a newer library of the forward compatibility package
    if needed is None or found < needed:
        at_least = f" at least {needed}" if needed else " a newer driver"
        return (
            f"driver {driver.version} is too old for CUDA {cuda}, for which torch is built and which needs{at_least}; "
            f"update the driver, load forward compatibility (package cuda-compat-{cuda.replace('.', '-')}, its folder "
            "first in LD_LIBRARY_PATH), or install a torch built for an older CUDA"
        )
    if driver.api_version is None:
        return f"driver {driver.version} is installed, but {driver.library} does not load; make it visible here"
    api = f"{driver.api_version // 1000}.{driver.api_version % 1000 // 10}"
    return (
        f"{driver.library} serves CUDA {api} only, although driver {driver.version} serves CUDA {cuda}, for which "
        "torch is built; take the folder of that library (an older cuda-compat) out of LD_LIBRARY_PATH"
    )


def describe_driver(driver: CudaDriver) -> str:
    """Driver version, and the forward compatibility library if one is loaded."""
    return f"{driver.version}, with {driver.library}" if "compat" in Path(driver.library).parts else driver.version


def _load_library() -> tuple[int | None, str]:
    """CUDA version and path of the libcuda.so.1 that the dynamic loader finds, which torch loads too."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "libcuda.so.1"
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None, _loaded_path("libcuda.so")
    return version.value, _loaded_path("libcuda.so")


def _loaded_path(name: str) -> str:
    """Path of a library that this process has loaded, by the beginning of its name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if (path := line.split(maxsplit=5)[-1]).startswith("/") and Path(path).name.startswith(name):
            return path
    return f"{name}.1"
