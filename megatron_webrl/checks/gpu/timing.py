"""Time of work on a device, host syncs in it, and results that compare times."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_webrl.checks.gpu.results import CheckResult, at_most, measured

REPEATS = 3  # timed passes, after one that is not


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work()` takes, until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def host_syncs(work: Callable[[], object]) -> Counter[str]:
    """How often the host waits for the GPU in `work()`, by "file:line".

    PyTorch warns of its own copies and reads of results (`torch.cuda.set_sync_debug_mode`), not of waits for events.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    syncs = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    return Counter(f"{Path(each.filename).name}:{each.lineno}" for each in syncs)


def not_slower(section: str, name: str, seconds: float, limit: float, note: str, cuda: bool) -> CheckResult:
    """Compare a pass with a slower way of computing the same; `note` says what is wrong if it takes longer."""
    if not cuda:  # cores that other processes use too: no failure
        return measured(section, name, 1000 * seconds, "ms", 1000 * limit)
    return at_most(section, name, 1000 * seconds, 1000 * limit, "ms", "" if seconds <= limit else note)
