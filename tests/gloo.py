"""Gloo processes for the tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_webrl.model import platform as platforms
from tests import forks


def spawn(run: Callable[..., None], *arguments: Any, ranks: int = 2, seconds: float = 600.0) -> None:
    """Run `run(rank, *arguments)` in processes, each with one thread; fails if they fail or take too long."""
    context = forks.start(run, *arguments, ranks=ranks)
    deadline = time.monotonic() + seconds
    try:
        # join returns after its limit, or when one process has ended; it raises if a process failed.
        if not any(context.join(timeout=max(0.0, deadline - time.monotonic())) for _ in range(ranks)):
            pytest.fail(f"the {ranks} ranks did not finish within {seconds:.0f} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def join(rank: int, ranks: int, folder: str) -> platforms.Platform:
    """Initialise torch.distributed on the CPU platform; import Megatron only after this."""
    torch.set_num_threads(1)
    platform = platforms.activate("cpu")
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/rendezvous-{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    return platform
