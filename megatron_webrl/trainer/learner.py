"""The model under training: score rows, take an optimiser step. Megatron's schedules run the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.config.loss import LossConfig
from megatron_webrl.model import schedule
from megatron_webrl.model.logprobs import vocab_parallel_logprobs
from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.trainer import loss as losses
from megatron_webrl.trainer.data.sequence_packer import Microbatch
from megatron_webrl.trainer.loss import Objective, TokenData
from megatron_webrl.trainer.optimizer import ScheduledOptimizer
from megatron_webrl.trainer.parallel import broadcast_from_last_stage
from megatron_webrl.trainer.reference import ReferencePolicy

Metrics = dict[str, float]


def make_objective(config: LossConfig) -> Objective:
    """The loss that the configuration names, over this rank's groups."""
    return losses.make_objective(config, parallel_state.get_context_parallel_group())


@dataclass
class Learner:
    """A Megatron model with its optimiser. Every method is collective over all trainer ranks.

    Log-probabilities exist on the last pipeline stage only; the other stages get empty lists.
    """

    chunks: list[Any]  # DistributedDataParallel around Qwen3VL, one per virtual pipeline stage of this rank
    vocab_size: int
    optimizer: ScheduledOptimizer
    reference: ReferencePolicy | None = None  # the policy with which RL began, if the loss refers to it
    report_progress: Callable[[], None] = lambda: None  # called for each row on the last pipeline stage

    @property
    def models(self) -> list[Any]:
        """This rank's chunks of the model itself."""
        return [chunk.module for chunk in self.chunks]

    def compute_logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probabilities of the response tokens of each row under the current weights, float32 [tokens]."""

        def scored(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            self.report_progress()
            logprobs, _ = self._logprobs(logits, microbatches[index])
            return logprobs.sum(), {"logprobs": logprobs}

        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            results = schedule.forward_backward(
                self.chunks, [batch.inputs for batch in microbatches], scored, forward_only=True
            )
        return [result["logprobs"] for result in results]

    def compute_reference_logprobs(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[list[Tensor] | None]:
        """The same of several minibatches under the weights of the reference; None for each without one."""
        if self.reference is None:
            return [None for _ in minibatches]
        with self.reference.swapped_in():
            return [self.compute_logprobs(rows) for rows in minibatches]

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        proximal: Sequence[Tensor] | None,
        loss: Objective,
        reference: Sequence[Tensor] | None = None,
    ) -> tuple[Metrics, list[Tensor]]:
        """One optimiser step on a minibatch. Takes what `accumulate` takes.

        Returns its figures with "gradient_norm", before clipping, and the log-probabilities before the step, per row.
        Raises optimizer.BadGradient.
        """
        figures, logprobs = self.forward_backward(microbatches, proximal, loss, reference)
        return figures | {"gradient_norm": self.optimizer.step()}, logprobs

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        proximal: Sequence[Tensor] | None,
        loss: Objective,
        reference: Sequence[Tensor] | None = None,
    ) -> tuple[Metrics, list[Tensor]]:
        """The gradient of a minibatch, in place of any before; the weights stay. See `gradient`.

        `proximal`: per row, float32 [tokens]; None: the current policy.

        `reference`: per row, float32 [tokens], for a loss that looks at it.

        The rows' weights make the sum of all losses over rows and data-parallel ranks the objective.
        Returns sums over all rows ("tokens" with prompts, "response_tokens", "entropy", those of the loss) and "loss",
        and the log-probabilities, per row.
        """
        # Megatron averages the loss over rows and the gradient over data-parallel ranks; the objective is a sum. For
        # context-parallel ranks, each of which scores some of a row's tokens, it adds up.
        scale = len(microbatches) * parallel_state.get_data_parallel_world_size()

        def measured(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            self.report_progress()
            batch = microbatches[index]
            current, entropy = self._logprobs(logits, batch)
            data = TokenData(
                behaviour_logprobs=batch.behaviour_logprobs,
                proximal_logprobs=current.detach() if proximal is None else proximal[index],
                advantage=batch.advantage,
                weight=batch.weight,
                step_index=batch.step_index,
                step_lengths=batch.step_lengths,
                reference_logprobs=None if reference is None else reference[index],
            )
            value, sums = loss(current, data)
            counted = (batch.weight > 0).float()
            sums |= {
                "loss": value.detach(),
                "entropy": (entropy.detach() * counted).sum(),
                "response_tokens": counted.sum(),
            }
            sums["tokens"] = counted.new_tensor(batch.token_count)
            return value * scale, {**sums, "logprobs": current.detach()}

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.optimizer.zero_grad()
        results = schedule.forward_backward(
            self.chunks, [batch.inputs for batch in microbatches], measured, forward_only=False
        )
        logprobs = [result.pop("logprobs") for result in results]
        return _reduce(results), logprobs

    def flat_gradient(self) -> Tensor:
        """What `accumulate` left, of all this rank's trained weights in one, float32 [weights]; a copy."""
        weights = [p for chunk in self.chunks for p in chunk.module.parameters() if p.requires_grad]
        return torch.cat([weight.main_grad.flatten() for weight in weights])

    def _logprobs(self, logits: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprobs(
            logits, batch.targets, batch.temperature, self.vocab_size, parallel_state.get_tensor_model_parallel_group()
        )


def _reduce(results: list[dict[str, Tensor]]) -> Metrics:
    """Sums over rows, data- and context-parallel ranks, on every rank."""
    totals: Metrics = {}
    if is_last_stage():
        names = sorted(results[0])
        sums = torch.stack([torch.stack([r[name].float() for r in results]).sum() for name in names])
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        totals = dict(zip(names, sums.tolist(), strict=True))
    return broadcast_from_last_stage(totals)
