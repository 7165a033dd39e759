"""Schedulers for engines whose weights change while requests run.

After an update every running request is computed again from its first token, images included. vLLM 0.32 does
not send a worker the pixels of an image whose tokens were in the prefix cache when the request began; the worker
then has nothing to compute it from, and the engine dies. These schedulers send the pixels always.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched import output
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


def _keep(mm_features: list[Any], num_computed_tokens: int, uses_mrope: bool = False) -> list[Any]:
    return mm_features


class _KeepsPixels:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        # Looked up by its name there at every new request; an engine has one scheduler.
        output.strip_covered_mm_data = _keep
        super().__init__(*arguments, **options)


class RecomputingScheduler(_KeepsPixels, Scheduler):
    """vLLM's scheduler."""


class RecomputingAsyncScheduler(_KeepsPixels, AsyncScheduler):
    """vLLM's scheduler that plans a step ahead."""
