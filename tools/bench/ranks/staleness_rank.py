"""Worker process of bench.staleness: updates of one version of a run with the groups of earlier versions.

One rank on gloo. Weights, optimiser and schedule are loaded from the checkpoint before every measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.loss import OffPolicyLossConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.types import Group
from megatron_webrl.util import torchvision_shim
from tools.bench import recorded_groups

LIMIT = timedelta(seconds=120)


@dataclass(frozen=True)
class UpdateStats:
    """One update with or without decoupling, and the gradients of its groups at its initial weights."""

    clipped: float  # fraction of response tokens whose clipped branch is active, over all minibatches
    capped: float  # fraction whose weight exceeds trainer.loss.importance_weight_cap
    gradient_norm: float  # before clipping, mean over optimiser steps
    trace: float  # of the covariance of the gradient over groups
    signal: float  # squared norm of the mean gradient

    @property
    def variance(self) -> float:
        """trace / signal: the variance of one group's gradient, in units of the mean gradient's squared norm."""
        return self.trace / self.signal


@dataclass(frozen=True)
class ObjectiveComparison:
    """The same update of the same weights with the same groups, decoupled and coupled."""

    version: int  # of the weights
    staleness: int  # version minus that of the behaviour policy
    groups: int
    logprob_mismatch: float | None  # max |behaviour - start policy| of log-probabilities at staleness 0; None at others
    decoupled: UpdateStats
    coupled: UpdateStats
    difference: float  # |difference of the mean gradients| / |decoupled mean gradient|


def run_config(folder: Path) -> Config:
    """The configuration of the run in `folder`, which may have been moved. Raises ConfigError."""
    config = parse_config(folder / "config.yaml")
    config.run.directory, config.run.name = str(folder.absolute().parent), folder.absolute().name
    config.model.checkpoint = ""  # where the run began: not needed any more, and perhaps gone
    return config


def checkpoint_path(folder: Path, version: int) -> Path:
    """Where the run in `folder` has its checkpoint of a version."""
    return folder / "checkpoints" / f"version-{version:06d}"


def serve(connection: Connection, parent: int, folder: Path, version: int, staleness: Sequence[int]) -> None:
    """Body of the process: sends a Pair for each staleness."""
    child_process.die_with_parent(parent=parent)
    torchvision_shim.install()
    config = run_config(folder)
    learner, builder = _make(config)
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    for behind in staleness:
        groups = recorded_groups.read_groups_of_version(config.records_folder, version - behind)
        restore = lambda: load_learner(checkpoint_path(folder, version), learner)  # noqa: E731
        connection.send(compare(learner, builder, config, groups, version, behind, restore))


def compare(
    learner: Any,
    builder: Any,
    config: Config,
    groups: Sequence[Group],
    version: int,
    staleness: int,
    restore: Callable[[], object],
) -> ObjectiveComparison:
    """Update policy `version` with both objectives; `restore` reloads its weights and optimiser."""
    from megatron_webrl.trainer.loop import train_batch

    arms: list[UpdateStats] = []
    means: list[Tensor] = []
    for decoupled in (True, False):
        chosen = with_decoupling(config, decoupled)
        restore()
        mean, trace = mean_and_covariance_trace(group_gradients(learner, builder, chosen, groups, version))
        metrics, gap = train_batch(learner, builder, chosen, groups, version)
        tokens = metrics["response_tokens"]
        arms.append(
            UpdateStats(
                clipped=metrics["clipped"] / tokens,
                capped=metrics["importance_weight_capped"] / tokens,
                gradient_norm=metrics["gradient_norm"],
                trace=trace,
                signal=float(mean.dot(mean)),
            )
        )
        means.append(mean)
    difference = float((means[0] - means[1]).norm() / means[0].norm())
    return ObjectiveComparison(version, staleness, len(groups), gap.largest, arms[0], arms[1], difference)


def with_decoupling(config: Config, decoupled: bool) -> Config:
    """The configuration with another trainer.loss.decoupled."""
    loss = replace(cast(OffPolicyLossConfig, config.trainer.loss), decoupled=decoupled)
    return replace(config, trainer=replace(config.trainer, loss=loss))


def group_gradients(
    learner: Any, builder: Any, config: Config, groups: Sequence[Group], version: int
) -> Iterator[Tensor]:
    """Yield the gradient of each group at the current weights, float32 [weights].

    Each is scaled by the number of groups, so that their mean is the gradient of the batch.
    """
    from megatron_webrl.trainer.data import batching
    from megatron_webrl.trainer.loss.objective import make_objective

    loss = config.trainer.loss
    samples = batching.training_samples(groups, config, version)
    in_batch = batching.token_weights(samples, loss.normalizer, loss.normalizer_constant)
    for group in groups:
        indices = [index for index, sample in enumerate(samples) if sample.trajectory_id[0] == group.ticket]
        part = [samples[index] for index in indices]
        # A group alone has other normalisation totals; the weights of all its tokens differ by the same factor.
        factor = in_batch[indices[0]] / batching.token_weights(part, loss.normalizer, loss.normalizer_constant)[0]
        learner.forward_backward(
            builder.build(part, loss.normalizer, loss.normalizer_constant), None, make_objective(loss, None, version)
        )
        yield flat_gradient(learner) * (len(groups) * factor)


def flat_gradient(learner: Any) -> Tensor:
    """A copy of the gradient that `forward_backward` has computed, over all trained weights of this rank, float32."""
    weights = [p for chunk in learner.chunks for p in chunk.module.parameters() if p.requires_grad]
    return torch.cat([weight.main_grad.flatten() for weight in weights])


def mean_and_covariance_trace(gradients: Iterable[Tensor]) -> tuple[Tensor, float]:
    """Mean, float64 [weights], and trace of the unbiased covariance of at least two gradients."""
    total, squares, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for gradient in gradients:
        exact = gradient.double()
        total, squares, count = total + exact, squares + float(exact.dot(exact)), count + 1
    mean = total / count
    return mean, (squares - count * float(mean.dot(mean))) / (count - 1)


def _make(config: Config) -> tuple[Any, Any]:
    """Learner and sequence packer of one rank on the configured platform."""
    from megatron_webrl.model import platform as platforms

    platform = platforms.activate(config.model.platform)
    torch.distributed.init_process_group(
        platform.backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=LIMIT
    )
    # Import Megatron after the platform is active.
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes
    from megatron_webrl.trainer.main import load_model, make_learner, make_sequence_packer

    process_groups.init_process_groups(ParallelSizes(), config.run.seed)
    return make_learner(config, load_model(config, platform)), make_sequence_packer(config, platform)
