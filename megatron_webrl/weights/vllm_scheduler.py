"""vLLM schedulers for engines whose weights change while requests run.

An update recomputes running requests, including images. vLLM 0.32 does not send pixels of an image whose tokens were
in the prefix cache; the worker cannot recompute it, and the engine dies. These schedulers always send the pixels.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched import output
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


def _keep_features(mm_features: list[Any], num_computed_tokens: int, uses_mrope: bool = False) -> list[Any]:
    return mm_features


class _KeepsPixels:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        # vLLM looks up this name for every new request; an engine has one scheduler.
        output.strip_covered_mm_data = _keep_features
        super().__init__(*arguments, **options)


class RecomputingScheduler(_KeepsPixels, Scheduler):
    """vLLM's scheduler, sending all pixels."""


class RecomputingAsyncScheduler(_KeepsPixels, AsyncScheduler):
    """vLLM's asynchronous scheduler, sending all pixels."""
