"""The training loop: collect groups, update, publish, account."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_webrl.config import Config
from megatron_webrl.tracking.metrics import Seconds, rollout_seconds
from megatron_webrl.trainer import batching
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.evaluation import Evaluation
from megatron_webrl.trainer.learner import Learner, Metrics, objective
from megatron_webrl.trainer.parallel import largest
from megatron_webrl.trainer.publish import Publisher
from megatron_webrl.trainer.replay import Replay
from megatron_webrl.trainer.rows import RowBuilder
from megatron_webrl.trainer.score import Gap, largest_gap
from megatron_webrl.trainer.sharing import Interruption
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
    replay: Replay
    evaluation: Evaluation
    version: int


def train(trainer: Trainer) -> None:
    """Run until `trainer.updates` updates are made or an early end is asked for; then write a checkpoint."""
    coordinator, settings = trainer.coordinator, trainer.config.trainer
    trainer.publisher.publish(trainer.version)
    trainer.evaluation.before(trainer.version, trainer.publisher)
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
        replayed = trainer.replay.draw(trainer.version)
        known = batching.without_lost_versions(groups, coordinator.start.incarnation)
        fresh = batching.relabelled(known, trainer.config, trainer.version)
        fixed = trainer.config.rollout.mode == "one_step_off"
        sync = _hand_over(trainer) if fixed else 0.0
        began = time.monotonic()
        metrics, gap = update(trainer.learner, trainer.builder, trainer.config, [*fresh, *replayed], trainer.version)
        trainer.replay.add(fresh, trainer.version)
        trained = time.monotonic()
        waited = largest(trainer.builder.waiting.take(), trainer.builder.device)
        trainer.version += 1
        if not fixed:
            sync = trainer.publisher.publish(trainer.version)
        seconds = Seconds(
            rollout_seconds([t for g in groups for t in g.trajectories]),
            trained - began,
            sync,
            collected - started,
            waited,
        )
        figures = metrics | {"learning_rate": trainer.learner.optimization.learning_rate, "replayed": len(replayed)}
        coordinator.record(trainer.version, groups, figures, gap, seconds, trainer.publisher.take_figures())
        coordinator.close(groups, trainer.version)
        coordinator.checkpoint(trainer.learner, trainer.version)
        trainer.evaluation.beside(trainer.version)
        started = time.monotonic()
    coordinator.final_checkpoint(trainer.learner, trainer.version)
    trainer.evaluation.after(trainer.version, trainer.publisher)
    coordinator.finish(trainer.version)


def _hand_over(trainer: Trainer) -> float:
    """Between two batches, with nothing in flight: give the engines the newest weights, and the next batch its tickets.

    Returns seconds. The batch is made with these weights while the one before it is trained (mode one_step_off).
    """
    version, publisher = trainer.version, trainer.publisher
    seconds = publisher.publish(version) if publisher.version != version else 0.0
    if version + 1 < trainer.config.trainer.updates:
        trainer.coordinator.open_next(version)
    return seconds


def update(
    learner: Learner, builder: RowBuilder, config: Config, groups: Sequence[Group], version: int
) -> tuple[Metrics, Gap]:
    """Train on one batch of groups, from policy `version` on. Collective over all trainer ranks.

    Returns sums over all passes (see Learner.step; loss and gradient norm are means), and the gap between engine and
    trainer.

    The proximal policy is the policy at the start of the update. With a single optimiser step it is the current
    policy itself, and its scores are those of the step.
    """
    settings = config.trainer
    samples = batching.training_samples(groups, config, version)
    parts = batching.minibatches(samples, settings.minibatches, seed=config.run.seed + version)
    single = settings.epochs * len(parts) == 1
    passes = settings.epochs + (not single) + (learner.reference is not None)
    rows = builder.build_all(parts, settings.loss.normaliser, settings.loss.k, passes)
    loss = objective(settings.loss)
    reference = learner.score_reference(rows)
    if single:
        totals, proximal = learner.step(rows[0], None, loss, reference[0])
        return totals, largest_gap(rows[0], proximal, version)
    scores = [learner.score(part) for part in rows]
    steps = [
        learner.step(part, proximal, loss, start)[0]
        for _ in range(settings.epochs)
        for part, proximal, start in zip(rows, scores, reference, strict=True)
    ]
    totals = {name: sum(metrics[name] for metrics in steps) for name in steps[0]}
    totals |= {name: totals[name] / len(steps) for name in ("loss", "gradient_norm")}
    return totals, largest_gap([row for part in rows for row in part], [s for part in scores for s in part], version)
