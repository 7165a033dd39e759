"""Trajectories per hour of a configuration: the event simulation, with the seconds of the cost model.

The limits of both are in docs/scaling.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.hardware import Card, Rates
from megatron_webrl.placement.memory_estimate import GIB, estimate_memory
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.placement.prediction import (
    EngineStep,
    EpisodeLengths,
    GenerationPrediction,
    TrainingPrediction,
    predict_generation,
    predict_training,
)
from megatron_webrl.placement.simulation import (
    UNLIMITED_CORES,
    EpisodeWork,
    GroupWork,
    SimulationResult,
    SimulationSettings,
    Slowdown,
    StepWork,
    UpdateTimes,
    simulate,
)

UPDATES, WARMUP_UPDATES = 20, 4
STEP_LIMITS = ((0.8, 10), (0.15, 20), (0.05, 30))  # share of tasks, steps at most: failures of 12.5 in the mean
WHOLE_PARTS = ("gradients and weights", "optimizer")  # of training, however many tokens a batch has
SHARED_SPEED = 0.5  # of engines whose GPUs train at the same time (cluster.colocate); assumed
BUSY = 0.9  # share from which a part is the limit


@dataclass(frozen=True)
class RandomWorkload:
    """Groups of tasks, each with a success rate of its own; a failed episode takes all steps of its limit."""

    lengths: EpisodeLengths
    group_size: int
    step: EngineStep
    dropped: frozenset[str]  # of all_failed, all_succeeded
    imitates: bool  # only successes are trained

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The next group."""
        given, size = self.lengths, self.group_size
        rate = rng.beta(given.success * given.success_concentration, (1 - given.success) * given.success_concentration)
        shares, limits = zip(*STEP_LIMITS, strict=True)
        scale = given.steps_of_failure / float(np.dot(shares, limits))
        limit = max(1, round(scale * limits[int(rng.choice(len(limits), p=shares))]))
        succeeds = rng.random(size) < rate
        lengths = np.where(succeeds, np.minimum(rng.geometric(1 / given.steps_of_success, size), limit), limit)
        episodes = tuple(
            self._episode(rng, int(length), bool(success) or not self.imitates)
            for length, success in zip(lengths, succeeds, strict=True)
        )
        outcome = "all_succeeded" if succeeds.all() else "mixed" if succeeds.any() else "all_failed"
        return GroupWork(episodes, outcome if outcome in self.dropped else None)

    @cached_property
    def _seconds(self) -> tuple[float, float]:
        """Of a step in an engine without other requests: before its response, and of each token of that."""
        return sum(self.step.blocking.values()), self.step.engine.decode(1, self.step.context)

    def _episode(self, rng: np.random.Generator, length: int, trainable: bool) -> EpisodeWork:
        given, (alone, token) = self.lengths, self._seconds
        waits = _log_normal(rng, given.browser_seconds, given.browser_sigma, length + 1).tolist()
        responses = _log_normal(rng, given.response_tokens, given.response_sigma, length).round().astype(int).tolist()
        prompt = round(self.step.prompt)
        steps = tuple(
            StepWork(alone + response * token, wait, prompt, response, given.browser_cpu_seconds)
            for response, wait in zip(responses, waits[1:], strict=True)
        )
        return EpisodeWork(waits[0], steps, trainable)


def _log_normal(rng: np.random.Generator, mean: float, sigma: float, count: int) -> np.ndarray:
    return np.asarray(np.exp(math.log(mean) - sigma**2 / 2 + sigma * rng.standard_normal(count)))


@dataclass(frozen=True)
class Prediction:
    """Trainer, engines, memory and throughput of a configuration."""

    card: str
    gpus: int
    training: TrainingPrediction | None  # None without a trainer
    generation: GenerationPrediction
    trainer_gib: float  # of the GPU that needs most
    engine_gib: float
    job: SimulationResult | None  # None without a trainer

    @property
    def update_seconds(self) -> float:
        """From one update to the next, with waits."""
        assert self.job is not None
        return 3600 / self.job.updates_per_hour

    @property
    def per_gpu_hour(self) -> float:
        """Trained trajectories an hour and GPU, of all GPUs."""
        assert self.job is not None
        return self.job.per_hour / self.gpus


def predict(
    config: Config, description: Mapping[str, Any], card: Card, lengths: EpisodeLengths, updates: int = UPDATES
) -> Prediction:
    """Predict a configuration from `updates` simulated ones. `description`: the model's config.json.

    Raises ConfigError without GPUs, in float32, if the mean sequence exceeds trainer.tokens_per_microbatch, or if no
    group would be trained.
    """
    if not config.cluster.gpus_per_node:
        raise ConfigError("a prediction needs GPUs, but cluster.gpus_per_node=0; set it")
    if config.model.dtype != "bfloat16":
        raise ConfigError(f"model.dtype={config.model.dtype} has no prediction: cards' rates are those of bfloat16")
    rates, estimate = Rates.of_card(card), estimate_memory(config, description)
    training = job = None
    if config.trainer_world_size:
        training = predict_training(config, description, rates, lengths)
        step = EngineStep.of_config(config, description, rates, lengths)
        job = _simulate(config, training, step, lengths, updates)
    return Prediction(
        card=card.name,
        gpus=config.cluster.nodes * config.cluster.gpus_per_node,
        training=training,
        generation=predict_generation(config, description, rates, lengths),
        trainer_gib=max((use.total for use in estimate.trainer), default=0) / GIB,
        engine_gib=estimate.engine.total / GIB,
        job=job,
    )


def _simulate(
    config: Config, training: TrainingPrediction, step: EngineStep, lengths: EpisodeLengths, updates: int
) -> SimulationResult:
    trainer, rollout = config.trainer, config.rollout
    settings = SimulationSettings(
        mode=rollout.mode,
        stepping=rollout.stepping,
        max_staleness=rollout.max_staleness,
        stale=rollout.stale,
        max_token_lag=config.max_token_lag,
        groups_per_update=trainer.groups_per_update,
        groups_in_flight=rollout.groups_in_flight,
        engines=rollout.engines,
        updates=updates,
        warmup_updates=updates * WARMUP_UPDATES // UPDATES,
        slowdown=_slowdown(step, config.requests_per_engine),
        overlap=SHARED_SPEED if config.cluster.colocate else 1.0,
        nodes=config.cluster.nodes,
        cores=_browser_cores(config),
    )
    imitates = trainer.loss.imitates_successes
    dropped = {"all_failed"} if imitates else {"all_failed", "all_succeeded"}
    if not imitates and (trainer.distillation.alone or trainer.zero_variance_groups == "keep"):
        dropped = set()
    workload = RandomWorkload(lengths, rollout.group_size, step, frozenset(dropped), imitates)
    whole = sum(training.parts.get(name, 0.0) for name in WHOLE_PARTS)
    sampled = trainer.groups_per_update * rollout.group_size * lengths.steps * (step.prompt + step.response)
    sync = training.sync_seconds
    other = training.checkpoint_seconds / training.checkpoint_every if training.checkpoint_every else 0.0
    times = UpdateTimes((training.train_seconds - whole) / sampled, sync, sync, other, whole)
    try:
        return simulate(settings, workload, [times])
    except RuntimeError as error:  # all groups have one outcome
        raise ConfigError(f"the job would train nothing: {error}; see rollout.group_size, --lengths success") from None


def _slowdown(step: EngineStep, most: int) -> Slowdown:
    """Of each request; those beyond `most` wait."""

    @cache
    def times(count: int) -> float:
        computed = min(count, most)
        return count / computed * step.seconds(computed) / step.seconds(1)

    return times


def _browser_cores(config: Config) -> int:
    """Cores of a node for browsers: those of its workers."""
    cores = {
        core for process in place_processes(config).on_node(0) if process.role == "rollout" for core in process.cores
    }
    return len(cores) or UNLIMITED_CORES


def limit_name(config: Config, prediction: Prediction) -> str:
    """What more throughput must change first: trainer, engines, cores, mode, groups in flight or admission."""
    job, rollout = prediction.job, config.rollout
    assert job is not None
    if 1 - job.waiting > BUSY:
        return "trainer"
    if job.engines_load > BUSY:
        return "engines"
    if job.cores_used > BUSY:
        return "cores"
    if rollout.mode != "async":
        return "mode"
    return "groups in flight" if job.slots_used > BUSY else "admission"


def binding_limit(config: Config, prediction: Prediction) -> str:
    """`limit_name` with what it means, in one line."""
    rollout, job = config.rollout, prediction.job
    assert job is not None
    name, load = limit_name(config, prediction), f"engines work at {job.engines_load:.0%}"
    meaning = {
        "trainer": "it hardly waits: give it more GPUs or a faster layout (--search)",
        "engines": "they are saturated: give them more GPUs",
        "cores": "those of the browsers are all busy: give a node more",
        "mode": f"rollout.mode={rollout.mode}: a batch ends with its slowest episode; async waits for none",
        "groups in flight": f"all of rollout.groups_in_flight={rollout.groups_in_flight} are in use; {load}",
        "admission": f"rollout.max_staleness={rollout.max_staleness} and trainer.groups_per_update="
        f"{config.trainer.groups_per_update} allow no more open groups; {load}",
    }  # fmt: skip
    return f"{name}: {meaning[name]}"
