"""Processes that are forked from a server which has imported what they need: a rank starts in a moment."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

PRELOAD = ["tests.weights.ranks", "tests.preloaded"]


def context() -> ForkServerContext:
    """The context of the one server that a test run has."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    return made


def start(run: Callable[..., None], *arguments: Any, ranks: int) -> Any:
    """Start `run(rank, *arguments)` in processes; gives torch's context of them."""
    context()
    return torch.multiprocessing.start_processes(
        run, args=arguments, nprocs=ranks, join=False, start_method="forkserver"
    )
