"""vLLM schedulers for engines whose weights change while requests run, and that return their routed experts.

An update recomputes running requests, including images. vLLM 0.32 does not send pixels of an image whose tokens were
in the prefix cache; the worker cannot recompute it, and the engine dies. These schedulers always send the pixels.

vLLM returns the experts of each token once, those of its first computation. A recomputed request of these schedulers
returns the experts of all its tokens again, after the earlier ones.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, AuxOutputSchedulerConnector
from vllm.v1.core.sched import output
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from megatron_webrl.control.child_process import collect_garbage


def _keep_features(mm_features: list[Any], num_computed_tokens: int, uses_mrope: bool = False) -> list[Any]:
    return mm_features


class _ReturnExpertsAgain(AuxOutputSchedulerConnector):
    """Has the worker return the experts of a request from its first token on whenever it begins to compute it."""

    def build_connector_meta(self, scheduler_output: Any, requests: dict[str, Any]) -> AuxOutputConnectorMetadata:
        """As vLLM's, where a request that is recomputed continues at its next token."""
        step = super().build_connector_meta(scheduler_output, requests)
        step.requests = dict.fromkeys(step.requests, 0)  # the worker reads it only of requests that begin
        return step


class _Recomputing:
    aux_output_connector: Any  # member of vLLM's scheduler; None if it returns no experts

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # vLLM looks up this name for every new request; an engine has one scheduler.
        output.strip_covered_mm_data = _keep_features
        super().__init__(*arguments, **options)
        if self.aux_output_connector is not None:
            self.aux_output_connector = _ReturnExpertsAgain()


class RecomputingScheduler(_Recomputing, Scheduler):
    """vLLM's scheduler for weights that change."""


class RecomputingAsyncScheduler(_Recomputing, AsyncScheduler):
    """vLLM's asynchronous scheduler for weights that change."""


collect_garbage()  # of an engine whose ranks have processes of their own
