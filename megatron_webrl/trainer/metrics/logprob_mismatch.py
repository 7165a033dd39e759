"""Difference between the engine's log-probabilities of sampled tokens and the trainer's, by version lag.

At lag 0 both have the same weights: what differs is arithmetic. At a greater lag the trainer's weights are newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_webrl.model.process_groups import is_last_stage
from megatron_webrl.trainer.data.batching import NO_VERSION
from megatron_webrl.trainer.data.sequence_packer import Microbatch
from megatron_webrl.trainer.loss.token_data import k3
from megatron_webrl.trainer.parallel import broadcast_from_last_stage

MAX_LAG = 4  # versions; tokens of a greater lag count here
BOUND = 0.1  # nats, of the share of tokens that differ more
MEAN_LIMIT = 0.05  # nats: mean difference of tokens under the same weights above which an update warns
KL_LIMIT = 0.5  # nats: KL divergence of the trainer from the engine at any version lag above which an update warns


@dataclass(frozen=True)
class LagMismatch:
    """Mismatch over the tokens of one version lag. d = log pi_trainer - log pi_engine, in nats."""

    tokens: int
    mean: float  # of |d|
    kl: float  # of k3(d), an estimate of KL(engine || trainer)
    largest: float  # |d|
    beyond: float  # share of tokens with |d| > BOUND


@dataclass(frozen=True)
class LogprobMismatch:
    """Mismatch of a batch, by version lag; without the lags that no token has."""

    by_lag: dict[int, LagMismatch]

    @property
    def largest(self) -> float | None:
        """max |d| under the same weights; None without such tokens."""
        return self.by_lag[0].largest if 0 in self.by_lag else None

    @property
    def tokens(self) -> int:
        """Number of tokens under the same weights."""
        return self.by_lag[0].tokens if 0 in self.by_lag else 0

    def alarms(self) -> list[str]:
        """What is wrong: the mean under the same weights or the divergence of a lag exceeds its limit."""
        found = []
        same = self.by_lag.get(0)
        if same is not None and same.mean > MEAN_LIMIT:
            found.append(
                f"the engine's and the trainer's log-probabilities of {same.tokens} tokens under the same weights "
                f"differ by {same.mean:.3g} nats in the mean and {same.largest:.3g} at most "
                f"(above {MEAN_LIMIT:g})"
            )
        for lag, each in sorted(self.by_lag.items()):
            if each.kl > KL_LIMIT:
                found.append(
                    f"the trainer has diverged from the engine by {each.kl:.3g} nats over {each.tokens} tokens of "
                    f"version lag {lag}, which differ by {each.largest:.3g} at most "
                    f"(above {KL_LIMIT:g})"
                )
        return found

    def metrics(self) -> dict[str, float]:
        """Metrics by MLflow name."""
        return {
            f"logprob_mismatch/{name}/lag_{lag}": float(value)
            for lag, found in sorted(self.by_lag.items())
            for name, value in asdict(found).items()
        }


def measure_logprob_mismatch(
    microbatches: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int
) -> LogprobMismatch:
    """Compare `logprobs` (float32 [tokens] per micro-batch, at `version`) with the engine's. Collective over all ranks.

    Only the last pipeline stage has log-probabilities; every rank gets the result.
    """
    if is_last_stage():
        return broadcast_from_last_stage(_measure(microbatches, logprobs, version))
    return broadcast_from_last_stage(LogprobMismatch({}))


def _measure(microbatches: Sequence[Microbatch], logprobs: Sequence[Tensor], version: int) -> LogprobMismatch:
    device = microbatches[0].inputs.tokens.device
    sums = torch.zeros(4, MAX_LAG + 1, dtype=torch.float64, device=device)  # tokens, |d|, k3, beyond
    peaks = torch.zeros(MAX_LAG + 1, device=device)
    for batch, trainer_logprobs in zip(microbatches, logprobs, strict=True):
        # A micro-batch of weight 0 is padding: it repeats another rank's tokens on a rank without samples.
        counted = (batch.versions != NO_VERSION) & (batch.weight > 0)
        lag = (version - batch.versions[counted]).clamp(0, MAX_LAG).long()
        difference = (trainer_logprobs - batch.behaviour_logprobs)[counted]
        size = difference.abs()
        values = torch.stack([torch.ones_like(size), size, k3(difference), (size > BOUND).to(size.dtype)])
        sums.index_add_(1, lag, values.double())
        peaks.scatter_reduce_(0, lag, size, "amax")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(sums, group=group)
    torch.distributed.all_reduce(peaks, op=torch.distributed.ReduceOp.MAX, group=group)
    return LogprobMismatch(
        {
            lag: LagMismatch(int(count), total / count, kl / count, peak, beyond / count)
            for lag, (count, total, kl, beyond, peak) in enumerate(zip(*sums.tolist(), peaks.tolist(), strict=True))
            if count
        }
    )
