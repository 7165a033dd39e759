"""Recording of routed experts in a vLLM worker, for routing replay.

vLLM 0.32 returns them only with its second model runner; this records them with the first, by the hooks of its routers,
and sends them with each step's output to the scheduler (vllm_scheduler.py), which collects them by request.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from megatron_webrl.weights.expert_store import RECORD_OPTION

log = logging.getLogger(__name__)


def records_experts(config: VllmConfig) -> bool:
    """Whether an engine is to record its routed experts."""
    additional: Any = config.additional_config
    return bool(additional.get(RECORD_OPTION))


def make_recorder(config: VllmConfig, model: torch.nn.Module) -> ExpertRecorder | None:
    """The recorder of a worker; None if its engine records nothing. Raises ValueError: "on", but a kernel cannot."""
    if not records_experts(config):
        return None
    try:
        return ExpertRecorder(config, model)
    except ValueError as error:  # of vLLM, for kernels that choose the experts themselves
        if config.additional_config[RECORD_OPTION] == "on":
            raise
        log.warning("routed experts are not recorded, so the trainer cannot replay them: %s", error)
        return None


class ExpertRecorder:
    """The experts of the step that a worker computes. Made before CUDA graphs are captured, which call its hooks."""

    def __init__(self, config: VllmConfig, model: torch.nn.Module) -> None:
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(model, self._capturer)
        layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        self._layers = torch.tensor(layers, device=self._capturer.device_buffer.device)
        # The largest number of the type means that nothing is recorded.
        few = config.model_config.get_num_experts() < np.iinfo(np.uint8).max
        self._dtype = torch.uint8 if few else torch.uint16

    def attach(self, runner: Any) -> None:
        """Add the experts of each step to the outputs of vLLM's model runner, on the rank that returns them."""
        if not get_tp_group().is_first_rank:
            return
        sample_tokens = runner.sample_tokens

        def with_experts(grammar_output: Any) -> Any:
            if runner.execute_model_state is None:
                return sample_tokens(grammar_output)
            step = self._copy_step(runner)
            output = sample_tokens(grammar_output)
            return _WithExperts(output, step) if isinstance(output, AsyncModelRunnerOutput) else step.add_to(output)

        runner.sample_tokens = with_experts

    def _copy_step(self, runner: Any) -> _StepExperts:
        scheduled, batch = runner.execute_model_state[0], runner.input_batch
        counts = {request: scheduled.num_scheduled_tokens[request] for request in batch.req_ids}
        starts = batch.num_computed_tokens_cpu[: len(counts)].tolist()
        computed = self._capturer.device_buffer[: sum(counts.values())]
        rows = computed.index_select(1, self._layers).to(self._dtype)
        return _StepExperts(counts, starts, rows)


class _StepExperts:
    """Experts of a step's tokens, [tokens, MoE layers, top_k], on their way to the host."""

    def __init__(self, counts: dict[str, int], starts: list[int], rows: torch.Tensor) -> None:
        self._counts, self._starts = counts, starts
        self._rows, self._copied = rows, None  # type: torch.Tensor, torch.cuda.Event | None
        if rows.is_cuda:
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def add_to(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Add the experts by request to an output, once they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        rows, found, first = self._rows.numpy(), {}, 0
        for (request, count), start in zip(self._counts.items(), self._starts, strict=True):
            # A view would keep the pinned rows of the whole step until the request ends.
            found[request] = AuxRequestOutput(start, rows[first : first + count].copy())
            first += count
        output.aux_output_connector_output = found
        return output


class _WithExperts(AsyncModelRunnerOutput):
    """An output of asynchronous scheduling with the experts of its step."""

    def __init__(self, output: AsyncModelRunnerOutput, step: _StepExperts) -> None:
        self._output, self._step = output, step

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the output and the experts."""
        return self._step.add_to(self._output.get_output())
