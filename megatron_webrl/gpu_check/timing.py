"""Time of work on a device."""

from __future__ import annotations

import time
from typing import Any

import torch


def seconds_of(work: Any, device: torch.device) -> float:
    """Seconds that `work()` takes, until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
