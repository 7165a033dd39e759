"""The training loop: collect groups, update, publish, account."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_webrl.config.schema import Config
from megatron_webrl.tracking.metrics import UpdateSeconds, rollout_seconds
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.evaluation_scheduler import EvaluationScheduler
from megatron_webrl.trainer.exchange.record_exchange import CollectInterrupt
from megatron_webrl.trainer.learner import Learner, Metrics, make_objective
from megatron_webrl.trainer.logprob_mismatch import LogprobMismatch, measure_logprob_mismatch
from megatron_webrl.trainer.parallel import all_reduce_max
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.types import Group

log = logging.getLogger(__name__)


@dataclass
class TrainingContext:
    """What the loop works with. Every rank runs the same loop; coordinator and publisher know which rank is first."""

    config: Config
    learner: Learner
    sequence_packer: SequencePacker
    weight_syncer: WeightSyncer
    coordinator: Coordinator
    replay: ReplayBuffer
    evaluation_scheduler: EvaluationScheduler
    version: int


def train(trainer: TrainingContext) -> None:
    """Run until `trainer.updates` updates are made or an early end is asked for; then write a checkpoint."""
    coordinator, settings = trainer.coordinator, trainer.config.trainer
    trainer.weight_syncer.sync(trainer.version)
    trainer.evaluation_scheduler.run_before_training(trainer.version, trainer.weight_syncer)
    coordinator.open_job(trainer.version)
    started = time.monotonic()
    while trainer.version < settings.updates:
        groups = coordinator.collect(trainer.version, trainer.weight_syncer.has_new_engines)
        if groups is CollectInterrupt.NEW_ENGINES:
            trainer.weight_syncer.sync(trainer.version, new_engines_only=True)
            continue
        if isinstance(groups, CollectInterrupt):
            break
        collected = time.monotonic()
        replayed = trainer.replay.sample(trainer.version)
        known = batching.clear_versions_before_restart(groups, coordinator.ticket_epoch.restart_epoch)
        fresh = batching.shuffled_rewards(known, trainer.config, trainer.version)
        fixed = trainer.config.rollout.mode == "one_step_off"
        sync = _hand_over(trainer) if fixed else 0.0
        began = time.monotonic()
        metrics, gap = train_batch(
            trainer.learner, trainer.sequence_packer, trainer.config, [*fresh, *replayed], trainer.version
        )
        trainer.replay.add(fresh, trainer.version)
        trained = time.monotonic()
        waited = all_reduce_max(trainer.sequence_packer.wait_timer.pop_seconds(), trainer.sequence_packer.device)
        trainer.version += 1
        if not fixed:
            sync = trainer.weight_syncer.sync(trainer.version)
        seconds = UpdateSeconds(
            rollout_seconds([t for g in groups for t in g.trajectories]),
            trained - began,
            sync,
            collected - started,
            waited,
        )
        figures = metrics | {"learning_rate": trainer.learner.optimizer.learning_rate, "replayed": len(replayed)}
        coordinator.log_update(
            trainer.version, groups, figures, gap, seconds, trainer.weight_syncer.last_transfer_metrics()
        )
        coordinator.close_update(groups, trainer.version)
        coordinator.checkpoint_if_due(trainer.learner, trainer.version)
        trainer.evaluation_scheduler.poll_during_training(trainer.version)
        started = time.monotonic()
    coordinator.final_checkpoint(trainer.learner, trainer.version)
    trainer.evaluation_scheduler.run_after_training(trainer.version, trainer.weight_syncer)
    coordinator.end_job(trainer.version)


def _hand_over(trainer: TrainingContext) -> float:
    """Between two batches, with nothing in flight: give the engines the newest weights, and the next batch its tickets.

    Returns seconds. The batch is made with these weights while the one before it is trained (mode one_step_off).
    """
    version, publisher = trainer.version, trainer.weight_syncer
    seconds = publisher.sync(version) if publisher.version != version else 0.0
    if version + 1 < trainer.config.trainer.updates:
        trainer.coordinator.open_next_batch(version)
    return seconds


def train_batch(
    learner: Learner, sequence_packer: SequencePacker, config: Config, groups: Sequence[Group], version: int
) -> tuple[Metrics, LogprobMismatch]:
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
    rows = sequence_packer.build_all(parts, settings.loss.normalizer, settings.loss.normalizer_constant, passes)
    loss = make_objective(settings.loss)
    reference = learner.compute_reference_logprobs(rows)
    if single:
        totals, proximal = learner.train_step(rows[0], None, loss, reference[0])
        return totals, measure_logprob_mismatch(rows[0], proximal, version)
    scores = [learner.compute_logprobs(part) for part in rows]
    steps = [
        learner.train_step(part, proximal, loss, start)[0]
        for _ in range(settings.epochs)
        for part, proximal, start in zip(rows, scores, reference, strict=True)
    ]
    totals = {name: sum(metrics[name] for metrics in steps) for name in steps[0]}
    totals |= {name: totals[name] / len(steps) for name in ("loss", "gradient_norm")}
    return totals, measure_logprob_mismatch(
        [row for part in rows for row in part], [s for part in scores for s in part], version
    )
