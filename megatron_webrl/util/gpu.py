"""GPUs of this machine, without a library: torch takes seconds to import."""

from __future__ import annotations

from pathlib import Path

DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of NVIDIA's driver on Linux, of Windows' in WSL


def has_gpu() -> bool:
    """Whether this machine, or container, has a GPU with a driver."""
    return any(file.exists() for file in DEVICE_FILES)
