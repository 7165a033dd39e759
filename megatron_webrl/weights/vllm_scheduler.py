"""vLLM schedulers for engines whose weights change while requests run, and that return their routed experts.

An update recomputes running requests, including images. vLLM 0.32 does not send pixels of an image whose tokens were
in the prefix cache; the worker cannot recompute it, and the engine dies. These schedulers always send the pixels.

With RECORD_OPTION a finished request returns the experts of its tokens (CompletionOutput.routed_experts).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched import output
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec

from megatron_webrl.control.child_process import collect_garbage
from megatron_webrl.weights.expert_store import ExpertStore, ScheduledTokens
from megatron_webrl.weights.vllm_experts import records_experts


def _keep_features(mm_features: list[Any], num_computed_tokens: int, uses_mrope: bool = False) -> list[Any]:
    return mm_features


class _Recomputing:
    # Members of vLLM's scheduler used here.
    kv_cache_manager: Any
    kv_cache_config: Any
    requests: dict[str, Any]
    vllm_config: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # vLLM looks up this name for every new request; an engine has one scheduler.
        output.strip_covered_mm_data = _keep_features
        super().__init__(*arguments, **options)
        self._experts: ExpertStore | None = None
        self._scheduled: dict[int, dict[str, ScheduledTokens]] = {}  # by step, until its output arrives
        if records_experts(self.vllm_config):
            groups = self.kv_cache_config.kv_cache_groups
            [self._group] = [i for i, each in enumerate(groups) if isinstance(each.kv_cache_spec, FullAttentionSpec)]
            size = groups[self._group].kv_cache_spec.block_size
            self._experts = ExpertStore(self.kv_cache_config.num_blocks, size)

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """As vLLM's; remembers the KV-cache blocks of the scheduled tokens, which a preemption would take away."""
        step = super().schedule(*arguments, **options)  # type: ignore[misc]
        if self._experts is not None:
            self._scheduled[id(step)] = self._tokens_of(step, self._experts.block_size)
        return step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's; finished requests return the experts of their tokens."""
        if self._experts is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        scheduled = self._scheduled.pop(id(scheduler_output))
        recorded = model_runner_output.aux_output_connector_output or {}
        # Those of requests that were aborted meanwhile, too: others find their tokens in the prefix cache.
        self._experts.add_step(scheduled, {name: each.rows for name, each in recorded.items()})
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for each in (each for part in outputs.values() for each in part.outputs):
            if each.finish_reason is not None:
                each.routed_experts = self._experts.take(each.request_id)
        self._experts.retain(self.requests.keys())
        return outputs

    def _tokens_of(self, step: Any, block_size: int) -> dict[str, ScheduledTokens]:
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {each.req_id: each.num_computed_tokens for each in step.scheduled_new_reqs}
        blocks = self.kv_cache_manager.coordinator.single_type_managers[self._group].req_to_blocks
        found = {}
        for name, start in starts.items():
            begins = name not in cached.req_ids or name in cached.resumed_req_ids
            first, end = 0 if begins else start // block_size, start + step.num_scheduled_tokens[name]
            used = blocks[name][first : -(-end // block_size)]
            found[name] = ScheduledTokens(start, first, [block.block_id for block in used], begins)
        return found


class RecomputingScheduler(_Recomputing, Scheduler):
    """vLLM's scheduler, sending all pixels, returning routed experts."""


class RecomputingAsyncScheduler(_Recomputing, AsyncScheduler):
    """vLLM's asynchronous scheduler, sending all pixels, returning routed experts."""


collect_garbage()  # of an engine whose ranks have processes of their own
