"""The training loop: collect groups, train on them, send the new weights to the engines, account for the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core import parallel_state

from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.credit.step_critic import assign_credit
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.data.packing import FORWARD_ONLY_SHARE
from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.evaluation_scheduler import EvaluationScheduler
from megatron_webrl.trainer.learner import Learner, Metrics
from megatron_webrl.trainer.loss.objective import make_objective
from megatron_webrl.trainer.metrics.logprob_mismatch import LogprobMismatch, measure_logprob_mismatch
from megatron_webrl.trainer.metrics.token_metrics import PER_STEP_METRICS
from megatron_webrl.trainer.multi_node.exchange import CollectInterrupt
from megatron_webrl.trainer.telemetry import Telemetry
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.types import Group


@dataclass
class TrainingContext:
    """State of the loop. Every rank runs the same loop; the coordinator and the weight syncer know the first rank."""

    config: Config
    learner: Learner
    sequence_packer: SequencePacker
    weight_syncer: WeightSyncer
    coordinator: Coordinator
    replay: ReplayBuffer
    evaluation_scheduler: EvaluationScheduler
    version: int


def train(context: TrainingContext) -> None:
    """Make `trainer.updates` updates, or fewer if an early end is requested; then write a checkpoint."""
    config, learner, packer = context.config, context.learner, context.sequence_packer
    coordinator, syncer, evaluations = context.coordinator, context.weight_syncer, context.evaluation_scheduler
    one_step_off, sync_seconds = config.rollout.mode == "one_step_off", 0.0
    syncer.sync(context.version)
    evaluations.run_before_training(context.version, syncer)
    coordinator.open_job(context.version)
    telemetry = Telemetry(config, learner.timeline, packer, syncer)
    while context.version < config.trainer.updates:
        telemetry.phase("wait for groups", context.version + 1)
        groups = _collect(context)
        telemetry.phase()
        if groups is None:
            break
        new = batching.clear_versions_before_restart(groups, coordinator.resume_point.restart_epoch)
        new = batching.shuffled_rewards(new, config, context.version)
        if one_step_off:
            sync_seconds = _sync_before_training(context)
        telemetry.phase("train", context.version + 1)
        batch = context.replay.batch(new, context.version)
        metrics, mismatch = train_batch(learner, packer, config, batch, context.version)
        context.replay.add(new, context.version)
        telemetry.phase()
        context.version += 1
        if not one_step_off:
            sync_seconds = syncer.sync(context.version)
        before, after = (sum(len(group.trajectories) for group in each) for each in (new, batch))
        metrics |= {"replayed": after - before}
        result = telemetry.finish_update(context.version, groups, metrics, mismatch, sync_seconds)
        telemetry.phase("log and account", context.version)
        coordinator.log_update(result)
        coordinator.close_update(groups, context.version)
        telemetry.phase("checkpoint", context.version)
        coordinator.checkpoint_if_due(learner, context.version)
        if not one_step_off:
            evaluations.poll_during_training(context.version)
    telemetry.phase("checkpoint", context.version)
    coordinator.final_checkpoint(learner, context.version)
    telemetry.phase()
    evaluations.run_after_training(context.version, syncer)
    complete = context.version >= config.trainer.updates and not evaluations.cut_short
    coordinator.end_job(context.version, complete)


def train_batch(
    learner: Learner, sequence_packer: SequencePacker, config: Config, groups: Sequence[Group], version: int
) -> tuple[Metrics, LogprobMismatch]:
    """Train policy `version` on one batch; returns totals over passes, but means of PER_STEP_METRICS. Collective.

    The total "operations" includes the passes that compute log-probabilities only.

    The proximal policy is that at the start of the update. The first step computes it anyway, on its own minibatch: no
    pass before it does, unless a critic needs the values at the start.
    """
    settings = config.trainer
    samples = batching.training_samples(groups, config, version)
    whole_groups = not settings.without_baseline  # without a baseline, a group need not stay whole
    parts = batching.minibatches(samples, settings.minibatches, config.run.seed + version, whole_groups)
    critic = settings.critic
    scored = settings.scored_minibatches(len(parts))
    order = [*range(scored, len(parts)), *range(scored)]  # of steps: the first one follows the last pass before them
    reference_passes = int(learner.reference is not None)
    passes = [settings.epochs + reference_passes + (number < scored) for number in range(len(parts))]
    normalizer = settings.loss.normalizer, settings.loss.normalizer_constant
    with learner.timeline.span("pack"):
        minibatches = sequence_packer.build_all(parts, *normalizer, passes)
    context_parallel = parallel_state.get_context_parallel_group()
    loss = make_objective(settings.loss, context_parallel, version, settings.distillation, critic)
    reference = learner.compute_reference_logprobs(minibatches)
    scores = [learner.score(microbatches) for microbatches in minibatches[:scored]]
    before = {number: [each["logprobs"] for each in part] for number, part in enumerate(scores)}
    credit_metrics: Metrics = {}
    if critic is not None:
        values = [[each["values"] for each in part] for part in scores]
        minibatches, credit_metrics = assign_credit(minibatches, values, groups, config)
    value_head_only = critic is not None and version < critic.warmup_updates
    if critic is not None and 0 < critic.warmup_updates == version:
        learner.optimizer.restart_adam()
    steps: list[Metrics] = []
    for number in order * settings.epochs:
        proximal = before.get(number) if settings.has_proximal_policy else None
        metrics, current = learner.train_step(minibatches[number], proximal, loss, reference[number], value_head_only)
        if not steps:
            before.setdefault(number, current)
        steps.append(metrics)
    totals = {name: sum(step[name] for step in steps) for name in steps[0]}
    totals |= {name: totals[name] / len(steps) for name in PER_STEP_METRICS if name in totals} | credit_metrics
    for number, step in zip(order, steps, strict=False):  # of the first epoch
        totals["operations"] += FORWARD_ONLY_SHARE * (passes[number] - settings.epochs) * step["operations"]
    compared = [each for number in before for each in minibatches[number]]
    return totals, measure_logprob_mismatch(compared, [each for part in before.values() for each in part], version)


def _collect(context: TrainingContext) -> list[Group] | None:
    """Groups of the next update; None: an early end is requested. New engines get the weights meanwhile."""
    syncer = context.weight_syncer
    while True:
        groups = context.coordinator.collect(
            context.version, syncer.has_new_engines, syncer.has_engines, context.replay.has_success
        )
        if groups is not CollectInterrupt.NEW_ENGINES:
            return None if isinstance(groups, CollectInterrupt) else groups
        syncer.sync(context.version, new_engines_only=True)


def _sync_before_training(context: TrainingContext) -> float:
    """Mode one_step_off: send the weights while no group is in flight, then open the next batch; returns seconds."""
    version, syncer, seconds = context.version, context.weight_syncer, 0.0
    if syncer.version != version:
        seconds = syncer.sync(version)
        context.evaluation_scheduler.poll_during_training(version)
    if version + 1 < context.config.trainer.updates:
        context.coordinator.open_next_batch(version)
    return seconds
