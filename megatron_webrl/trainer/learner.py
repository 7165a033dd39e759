"""The model under training: score rows, take an optimiser step. Megatron's schedules run the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.config import LossConfig
from megatron_webrl.model import schedule
from megatron_webrl.model.groups import last_stage
from megatron_webrl.model.logprobs import vocab_parallel_logprobs
from megatron_webrl.trainer.loss import TokenData, decoupled_surrogate, likelihood
from megatron_webrl.trainer.optimizer import Optimization
from megatron_webrl.trainer.parallel import from_last_stage
from megatron_webrl.trainer.rows import Microbatch

Metrics = dict[str, float]
Objective = Callable[[Tensor, TokenData], tuple[Tensor, dict[str, Tensor]]]


def objective(config: LossConfig) -> Objective:
    """The loss that the configuration names."""
    return likelihood if config.name == "raft" else partial(decoupled_surrogate, config=config)


@dataclass
class Learner:
    """A Megatron model with its optimiser. Every method is collective over all trainer ranks.

    Log-probabilities exist on the last pipeline stage only; the other stages get empty lists.
    """

    chunks: list[Any]  # DistributedDataParallel around Qwen3VL, one per virtual pipeline stage of this rank
    vocab_size: int
    optimization: Optimization

    @property
    def models(self) -> list[Any]:
        """This rank's chunks of the model itself."""
        return [chunk.module for chunk in self.chunks]

    def score(self, rows: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probabilities of the response tokens of each row under the current weights, float32 [tokens]."""

        def scored(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, _ = self._logprobs(logits, rows[index])
            return logprobs.sum(), {"logprobs": logprobs}

        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            results = schedule.run(self.chunks, [batch.row for batch in rows], scored, forward_only=True)
        return [result["logprobs"] for result in results]

    def step(
        self, rows: Sequence[Microbatch], proximal: Sequence[Tensor] | None, loss: Objective
    ) -> tuple[Metrics, list[Tensor]]:
        """One optimiser step on a minibatch. `proximal`: per row, float32 [tokens]; None: the current policy.

        The rows' weights make the sum of all losses over rows and data-parallel ranks the objective.
        Returns sums over all rows ("tokens" with prompts, "response_tokens", "entropy", those of the loss), "loss" and
        "gradient_norm", and the log-probabilities before the step, per row.
        Raises optimizer.BadGradient.
        """
        # Megatron averages the loss over rows and the gradient over data-parallel ranks; the objective is a sum. For
        # context-parallel ranks, each of which scores some of a row's tokens, it adds up.
        scale = len(rows) * parallel_state.get_data_parallel_world_size()

        def measured(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            batch = rows[index]
            current, entropy = self._logprobs(logits, batch)
            reference = current.detach() if proximal is None else proximal[index]
            data = TokenData(batch.behaviour, reference, batch.advantage, batch.weight)
            value, sums = loss(current, data)
            counted = (batch.weight > 0).float()
            sums |= {
                "loss": value.detach(),
                "entropy": (entropy.detach() * counted).sum(),
                "response_tokens": counted.sum(),
            }
            sums["tokens"] = counted.new_tensor(batch.tokens)
            return value * scale, {**sums, "logprobs": current.detach()}

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimization.optimizer.zero_grad()
        results = schedule.run(self.chunks, [batch.row for batch in rows], measured, forward_only=False)
        norm = self.optimization.step()
        logprobs = [result.pop("logprobs") for result in results]
        return _reduce(results) | {"gradient_norm": norm}, logprobs

    def _logprobs(self, logits: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprobs(
            logits, batch.targets, batch.temperature, self.vocab_size, parallel_state.get_tensor_model_parallel_group()
        )


def _reduce(results: list[dict[str, Tensor]]) -> Metrics:
    """Sums over rows, data- and context-parallel ranks, on every rank."""
    totals: Metrics = {}
    if last_stage():
        names = sorted(results[0])
        sums = torch.stack([torch.stack([r[name].float() for r in results]).sum() for name in names])
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        totals = dict(zip(names, sums.tolist(), strict=True))
    return from_last_stage(totals)
