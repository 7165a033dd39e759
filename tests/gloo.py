"""Two gloo processes for the tests: first tensor-parallel, then two replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_webrl.model import platform as platforms


def spawn(run: Callable[..., None], *arguments: Any, seconds: float = 200.0) -> None:
    """Run `run(rank, *arguments)` in two processes, each with one thread; fails if they fail or take too long."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OMP_NUM_THREADS", "1")
    context = torch.multiprocessing.spawn(run, args=arguments, nprocs=2, join=False)
    try:
        # join returns after the limit, or when one process has ended; it raises if a process failed.
        if not any(context.join(timeout=seconds) for _ in range(2)):
            pytest.fail("the two ranks did not finish within their limit")
    finally:
        patch.undo()
        for process in context.processes:
            if process.is_alive():
                process.kill()


def layouts(rank: int, folder: str) -> Iterator[tuple[int, platforms.Platform]]:
    """In each process: the tensor-parallel sizes 2 and 1, with Megatron's groups formed for each."""
    torch.set_num_threads(1)
    platform = platforms.use("cpu")
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    # Megatron is imported on the platform that is in use.
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    for size in (2, 1):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        model_parallel_cuda_manual_seed(1)
        yield size, platform
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
