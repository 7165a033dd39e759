"""Processes forked from a server that has imported their modules, so that a rank starts at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

PRELOAD = ["tests.weights.ranks", "tests.preloaded"]


def context() -> ForkServerContext:
    """The context of the fork server of this test run."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server


def start(run: Callable[..., None], *arguments: Any, ranks: int) -> Any:
    """Start `run(rank, *arguments)` in processes; returns torch's process context."""
    context()
    return torch.multiprocessing.start_processes(
        run, args=arguments, nprocs=ranks, join=False, start_method="forkserver"
    )
