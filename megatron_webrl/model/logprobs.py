"""Log-probabilities of target tokens from vocabulary-parallel logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

CHUNK_ELEMENTS = 2**24  # float32 elements of one chunk of logits (64 MiB): working memory beyond the logits themselves


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` and entropies at a temperature, both float32 [R], the same on every rank.

    `logits`: [R, padded vocabulary / ranks of `group`], this rank's slice in rank order; columns from `vocab_size` on
    are padding without probability. `targets`: int64 [R]. `group`: None for one rank. Both results are differentiable;
    the gradient of entropies is computed only if a loss uses them. Collective over `group`, the forward pass only.
    Raises ValueError for mismatched shapes and for a temperature that is not positive.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {list(logits.shape)} and targets {list(targets.shape)} must be [R, V/tp] and [R]")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0")
    return _VocabParallelLogprobs.apply(logits, targets, temperature, vocab_size, group)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Saves the logits and two numbers per row; the backward pass recomputes the softmax chunk by chunk.

    Log-sum-exp and entropy are those of the whole vocabulary, so that each rank has the gradient of its own columns.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        first = logits.shape[1] * (torch.distributed.get_rank(group) if group is not None else 0)
        real = min(max(vocab_size - first, 0), logits.shape[1])  # columns of this slice that are not padding
        local = targets - first
        logp, entropy, lse = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3))
        for rows in _chunks(logits):
            scaled = logits[rows, :real].float() / temperature
            logp[rows], entropy[rows], lse[rows] = _statistics(scaled, local[rows], group)
        ctx.save_for_backward(logits, local, lse, entropy)
        ctx.temperature, ctx.real = temperature, real
        ctx.set_materialize_grads(False)  # an output that no loss uses has the gradient None
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """The gradient of each row times that of the row's outputs at the scaled logits, over the temperature.

        one-hot - p for the log-probability, - p (log p + H) for the entropy H; p is the softmax.
        """
        logits, local, lse, entropy = ctx.saved_tensors
        of_logprob, of_entropy = (None if each is None else each / ctx.temperature for each in gradients)
        if of_logprob is None:
            of_logprob = torch.zeros_like(lse)
        result = torch.zeros_like(logits)
        for rows in _chunks(logits):
            log_p = logits[rows, : ctx.real].float() / ctx.temperature - lse[rows, None]
            factor = -of_logprob[rows, None]
            if of_entropy is not None:
                factor = factor - of_entropy[rows, None] * (log_p + entropy[rows, None])
            part = log_p.exp_().mul_(factor)
            if ctx.real:
                mine, column = _own_column(local[rows], ctx.real)
                part.scatter_add_(1, column, (of_logprob[rows] * mine)[:, None])
            result[rows, : ctx.real] = part.to(logits.dtype)
        return result, None, None, None, None


def _statistics(scaled: Tensor, local: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log-sum-exp (lse) of each row of `scaled` [r, real]."""
    real = scaled.shape[1]
    peak = scaled.amax(dim=1) if real else scaled.new_full(scaled.shape[:1], -torch.inf)
    _reduce(peak, ReduceOp.MAX, group)
    shifted = scaled - peak[:, None]
    weights = shifted.exp()
    # Sum of weights, weighted sum of logits, and the target's logit; one reduction for all three.
    sums = torch.zeros(3, scaled.shape[0], dtype=torch.float32, device=scaled.device)
    sums[0] = weights.sum(dim=1)
    sums[1] = (weights * shifted).sum(dim=1)
    if real:
        mine, column = _own_column(local, real)
        sums[2] = torch.where(mine, shifted.gather(1, column)[:, 0], 0.0)
    _reduce(sums, ReduceOp.SUM, group)
    log_total = sums[0].log()
    return sums[2] - log_total, log_total - sums[1] / sums[0], peak + log_total


def _own_column(local: Tensor, real: int) -> tuple[Tensor, Tensor]:
    """Whether each target is in this slice, bool [r], and its column, else any one, [r, 1]. Waits for no device."""
    return (local >= 0) & (local < real), local.clamp(0, real - 1)[:, None]


def _reduce(tensor: Tensor, operation: Any, group: ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(tensor, op=operation, group=group)


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows whose float32 copies stay under CHUNK_ELEMENTS; the same number on every rank."""
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]
