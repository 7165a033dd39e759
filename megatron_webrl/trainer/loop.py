"""The training loop: collect groups, update, publish, account."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_webrl.config import Config
from megatron_webrl.tracking.metrics import Seconds, rollout_seconds
from megatron_webrl.trainer import batching
from megatron_webrl.trainer.coordinator import Coordinator, Interruption
from megatron_webrl.trainer.learner import Learner, Metrics, objective
from megatron_webrl.trainer.publish import Publisher
from megatron_webrl.trainer.rows import Microbatch, RowBuilder
from megatron_webrl.trainer.score import Gap, largest_gap
from megatron_webrl.types import Group

log = logging.getLogger(__name__)


@dataclass
class Trainer:
    """What the loop works with. Every rank runs the same loop; coordinator and publisher know which rank is first."""

    config: Config
    learner: Learner
    builder: RowBuilder
    publisher: Publisher
    coordinator: Coordinator
    version: int


def train(trainer: Trainer) -> None:
    """Run until `trainer.updates` updates are made or an early end is asked for; then write a checkpoint."""
    coordinator, settings = trainer.coordinator, trainer.config.trainer
    trainer.publisher.publish(trainer.version)
    coordinator.open_job(trainer.version)
    started = time.monotonic()
    while trainer.version < settings.updates:
        groups = coordinator.collect(trainer.version, trainer.publisher.newcomers)
        if groups is Interruption.NEWCOMERS:
            trainer.publisher.publish(trainer.version, newcomers_only=True)
            continue
        if isinstance(groups, Interruption):
            break
        collected = time.monotonic()
        metrics, gap = update(trainer.learner, trainer.builder, trainer.config, groups, trainer.version)
        trained = time.monotonic()
        trainer.version += 1
        sync = trainer.publisher.publish(trainer.version)
        seconds = Seconds(
            rollout_seconds([t for g in groups for t in g.trajectories]), trained - collected, sync, collected - started
        )
        figures = metrics | {"learning_rate": trainer.learner.optimization.learning_rate}
        coordinator.record(trainer.version, groups, figures, gap, seconds, trainer.publisher.take_figures())
        coordinator.close(groups, trainer.version)
        coordinator.checkpoint(trainer.learner, trainer.version)
        started = time.monotonic()
    coordinator.final_checkpoint(trainer.learner, trainer.version)
    coordinator.finish(trainer.version)


def update(
    learner: Learner, builder: RowBuilder, config: Config, groups: Sequence[Group], version: int
) -> tuple[Metrics, Gap]:
    """Train on one batch of groups, from policy `version` on. Collective over all trainer ranks.

    Returns sums over all passes (see Learner.step; loss and gradient norm are means), and the gap between engine and
    trainer.

    The proximal policy is the policy at the start of the update. With a single optimiser step it is the current
    policy itself, and its scores are those of the step.
    """
    advantages = batching.imitation if config.trainer.loss.name == "raft" else batching.group_advantages
    parts = batching.minibatches(
        batching.samples_of(groups, advantages), config.trainer.minibatches, seed=config.run.seed + version
    )
    rows = [builder.build(part, config.trainer.loss.normaliser, config.trainer.loss.k) for part in parts]
    loss = objective(config.trainer.loss)
    if config.trainer.epochs * len(rows) == 1:
        totals, proximal = learner.step(rows[0], None, loss)
        return totals, largest_gap(rows[0], proximal, version)
    references = [learner.score(part) for part in rows]
    steps = [
        learner.step(part, reference, loss)[0]
        for _ in range(config.trainer.epochs)
        for part, reference in zip(rows, references, strict=True)
    ]
    totals = {name: sum(metrics[name] for metrics in steps) for name in steps[0]}
    totals |= {name: totals[name] / len(steps) for name in ("loss", "gradient_norm")}
    flat: list[Microbatch] = [row for part in rows for row in part]
    return totals, largest_gap(flat, [scores for part in references for scores in part], version)
