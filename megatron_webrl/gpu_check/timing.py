"""Time of work on a device, and results that compare times."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_webrl.gpu_check.results import CheckResult, at_most, measured

REPEATS = 3  # timed passes, after one that is not


def seconds_of(work: Any, device: torch.device) -> float:
    """Seconds that `work()` takes, until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def not_slower(section: str, name: str, seconds: float, limit: float, note: str, cuda: bool) -> CheckResult:
    """Compare a pass with a slower way of computing the same; `note` says what is wrong if it takes longer."""
    if not cuda:  # cores that other processes use too: no failure
        return measured(section, name, 1000 * seconds, "ms", 1000 * limit)
    return at_most(section, name, 1000 * seconds, 1000 * limit, "ms", "" if seconds <= limit else note)
