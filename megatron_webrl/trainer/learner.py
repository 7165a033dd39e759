"""The model under training: compute log-probabilities, take optimiser steps. Megatron's schedules run the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.model import schedule
from megatron_webrl.model.logprobs import vocab_parallel_logprobs
from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.model.value_head import VALUE_HEAD
from megatron_webrl.track.timeline import OFF, Timeline
from megatron_webrl.trainer.data.packing import FORWARD_ONLY_SHARE
from megatron_webrl.trainer.data.sequence_packer import Microbatch
from megatron_webrl.trainer.loss.token_data import Objective, ResponseTokens, StepValues, TokenData
from megatron_webrl.trainer.metrics.token_metrics import token_statistics
from megatron_webrl.trainer.optimizer import ScheduledOptimizer
from megatron_webrl.trainer.parallel import broadcast_from_last_stage

Metrics = dict[str, float]
ModelOutput = Tensor | tuple[Tensor, Tensor]  # logits, or logits and values


class ReferencePolicy:
    """A copy in host memory of the modules' weights; a swap needs memory for one parameter on the device."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._stored = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the reference weights into the modules; on leaving the context, restore the modules' own exactly."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, stored in zip(self._parameters, self._stored, strict=True):
            before = parameter.detach().clone()
            parameter.copy_(stored)  # in place: optimiser and weight transfer have views of this memory
            stored.copy_(before)


@dataclass
class Learner:
    """A Megatron model with its optimiser. Every method is collective over all trainer ranks.

    Log-probabilities exist on the last pipeline stage only; the other stages get empty lists.
    """

    chunks: list[Any]  # DistributedDataParallel around VisionLanguageModel, one per virtual pipeline stage of this rank
    vocab_size: int
    optimizer: ScheduledOptimizer
    reference: ReferencePolicy | None = None  # the policy at the start of RL, if the loss has a KL penalty
    timeline: Timeline = OFF
    report_progress: Callable[[], None] = lambda: None  # called per micro-batch on the last pipeline stage

    @property
    def models(self) -> list[Any]:
        """This rank's model chunks without their DistributedDataParallel wrappers."""
        return [chunk.module for chunk in self.chunks]

    def compute_logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probabilities of the response tokens under the current weights, float32 [tokens] per micro-batch."""
        return [scores["logprobs"] for scores in self.score(microbatches)]

    def score(self, microbatches: Sequence[Microbatch]) -> list[dict[str, Tensor]]:
        """`compute_logprobs` as "logprobs", and with a critic "values" of the steps, float32 [values]."""

        def collect_scores(index: int, output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
            self.report_progress()
            logits, values = _logits_and_values(output)
            logprobs, _ = self._logprobs(logits, microbatches[index])
            return logprobs.sum(), {"logprobs": logprobs} | ({} if values is None else {"values": values})

        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad(), self.timeline.span("log-probabilities", microbatches=len(microbatches)):
            return schedule.forward_backward(
                self.chunks, [batch.inputs for batch in microbatches], collect_scores, forward_only=True
            )

    def compute_reference_logprobs(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[list[Tensor] | None]:
        """`compute_logprobs` of several minibatches under the reference policy; None for each if there is none."""
        if self.reference is None:
            return [None for _ in minibatches]
        with self.reference.swapped_in():
            return [self.compute_logprobs(microbatches) for microbatches in minibatches]

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        proximal: Sequence[Tensor] | None,
        loss: Objective,
        reference: Sequence[Tensor] | None = None,
        value_head_only: bool = False,
    ) -> tuple[Metrics, list[Tensor]]:
        """`forward_backward` and an optimiser step; adds "gradient_norm", before clipping, and "learning_rate".

        Adds "gradient_clipped" too: 1 if the norm exceeded trainer.optimizer.clip_norm, else 0. `value_head_only`: the
        step changes the critic's value head alone, and the norm is that of its gradient. Raises
        NonFiniteGradient.
        """
        with self.timeline.span("forward and backward", microbatches=len(microbatches)):
            metrics, logprobs = self.forward_backward(microbatches, proximal, loss, reference)
        if value_head_only:
            self._clear_gradients_of_policy()
        rate = self.optimizer.learning_rate
        with self.timeline.span("optimizer"):
            gradient_norm = self.optimizer.step(value_head_only)
        clipped = float(gradient_norm > self.optimizer.clip_norm)
        step = {"gradient_norm": gradient_norm, "gradient_clipped": clipped, "learning_rate": rate}
        return metrics | step, logprobs

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        proximal: Sequence[Tensor] | None,
        loss: Objective,
        reference: Sequence[Tensor] | None = None,
    ) -> tuple[Metrics, list[Tensor]]:
        """Compute the gradient of a minibatch and replace the one in the gradient buffers; weights do not change.

        `proximal`: log-probabilities per micro-batch, float32 [tokens]; None: the current policy. `reference`: for KL.
        The objective is the sum of the losses on all data-parallel ranks; `Microbatch.weight` normalises it. Returns
        totals over micro-batches and ranks, "loss", "tokens" (prompts included) and "replayed_tokens" of them,
        "operations" (floating-point ones of both passes, without recomputation), those of `token_statistics` and the
        loss's own; and the log-probabilities per micro-batch.
        """
        # Megatron averages the loss over micro-batches and the gradient over data-parallel ranks; the objective is a
        # sum. Over context-parallel ranks, each of which has some of a sequence's tokens, Megatron adds up.
        scale = len(microbatches) * parallel_state.get_data_parallel_world_size()

        def compute_loss(index: int, output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
            self.report_progress()
            batch = microbatches[index]
            logits, values = _logits_and_values(output)
            current, entropy = self._logprobs(logits, batch)
            data = TokenData(
                **{each.name: getattr(batch, each.name) for each in fields(ResponseTokens)},
                proximal_logprobs=current.detach() if proximal is None else proximal[index],
                reference_logprobs=None if reference is None else reference[index],
                entropy=entropy,
                values=_step_values(values, batch),
            )
            value, sums = loss(current, data)
            sums |= token_statistics(current, entropy, data, batch.succeeded)
            sums |= {
                "loss": value.detach(),
                "tokens": value.new_full((), batch.token_count),
                "replayed_tokens": value.new_full((), batch.replayed_tokens),
                "operations": value.new_full((), batch.operations / FORWARD_ONLY_SHARE),
            }
            return value * scale, {**sums, "logprobs": current.detach()}

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.optimizer.zero_grad()
        results = schedule.forward_backward(
            self.chunks, [batch.inputs for batch in microbatches], compute_loss, forward_only=False
        )
        logprobs = [result.pop("logprobs") for result in results]
        return _reduce(results), logprobs

    def _clear_gradients_of_policy(self) -> None:
        for name, parameter in (each for model in self.models for each in model.named_parameters()):
            if parameter.requires_grad and not name.startswith(f"{VALUE_HEAD}."):
                parameter.main_grad.zero_()

    def _logprobs(self, logits: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprobs(
            logits, batch.targets, batch.temperature, self.vocab_size, parallel_state.get_tensor_model_parallel_group()
        )


def _logits_and_values(output: ModelOutput) -> tuple[Tensor, Tensor | None]:
    return (output, None) if isinstance(output, Tensor) else output


def _step_values(values: Tensor | None, batch: Microbatch) -> StepValues | None:
    if values is None or batch.value_targets is None:
        return None
    return StepValues(values, batch.value_targets, batch.value_weight)


def _reduce(results: list[dict[str, Tensor]]) -> Metrics:
    """Sums over micro-batches, data- and context-parallel ranks, on every rank."""
    totals: Metrics = {}
    if is_last_stage():
        names = sorted(results[0])
        sums = torch.stack([torch.stack([each[name].float() for each in results]).sum() for name in names])
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        totals = dict(zip(names, sums.tolist(), strict=True))
    return broadcast_from_last_stage(totals)
