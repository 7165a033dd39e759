"""Predict clusters that were never measured: simulate each split of their GPUs from the inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.cluster.inputs import SimulationInputs
from tools.cluster.simulation import SimulationResult, simulate
from tools.cluster.work import EpisodeWork, GroupWork, SimulationSettings, StepWork, UpdateTimes

STEP_LIMITS = (10, 20, 30)  # by difficulty
RECOMMENDATION_MARGIN = 0.05  # splits within this fraction of the fastest count as equally fast


@dataclass(frozen=True)
class GpuSplit:
    """GPUs of all nodes by role; `colocated`: all GPUs alternate between both roles."""

    nodes: int
    engines: int
    trainers: int
    colocated: bool = False

    def __str__(self) -> str:
        return "all, colocated" if self.colocated else f"{self.engines}:{self.trainers}"


@dataclass(frozen=True)
class SimulationLength:
    """Length of a simulated run."""

    updates: int
    warmup_updates: int


FULL = SimulationLength(updates=20, warmup_updates=4)
QUICK = SimulationLength(updates=6, warmup_updates=2)


@dataclass(frozen=True)
class ClusterPrediction:
    """A simulated cluster."""

    split: GpuSplit
    mode: str
    stepping: str
    max_staleness: int
    result: SimulationResult


@dataclass(frozen=True)
class RandomWorkload:
    """Groups of tasks, each with a success rate of its own; a failed episode takes all steps of its limit.

    With `drop_zero_variance` a group without a success or without a failure is dropped.
    """

    inputs: SimulationInputs

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The next group."""
        given = self.inputs
        rate = rng.beta(given.success * given.success_concentration, (1 - given.success) * given.success_concentration)
        limit = STEP_LIMITS[
            int(rng.choice(3, p=(1 - given.medium_share - given.hard_share, given.medium_share, given.hard_share)))
        ]
        succeeds = rng.random(given.group_size) < rate
        lengths = np.where(succeeds, np.minimum(rng.geometric(1 / given.steps_success, given.group_size), limit), limit)
        episodes = tuple(self._episode(rng, int(length)) for length in lengths)
        if not given.drop_zero_variance or 0 < succeeds.sum() < given.group_size:
            return GroupWork(episodes)
        return GroupWork(episodes, "all_succeeded" if succeeds.all() else "all_failed")

    def _episode(self, rng: np.random.Generator, length: int) -> EpisodeWork:
        given = self.inputs
        waits = given.browser_seconds * np.exp(given.browser_sigma * rng.standard_normal(length + 1))
        waits = np.minimum(waits, given.browser_limit).tolist()
        center = math.log(given.response) - given.response_sigma**2 / 2
        responses = np.exp(center + given.response_sigma * rng.standard_normal(length)).round().astype(int).tolist()
        prompt = round(given.prompt)
        steps = tuple(
            StepWork(request_seconds(given, response), wait, prompt, response, given.browser_cpu_seconds)
            for response, wait in zip(responses, waits[1:], strict=True)
        )
        return EpisodeWork(waits[0], steps)


def request_seconds(inputs: SimulationInputs, response: float) -> float:
    """Seconds of a request in an engine without other requests."""
    return inputs.prompt / inputs.prefill_tokens_per_second + response * inputs.token_seconds


def serial_share(inputs: SimulationInputs) -> float:
    """Fraction of a mean request that an engine does one request at a time: prefill, and a little of every token."""
    serial = inputs.prompt / inputs.prefill_tokens_per_second + inputs.response * inputs.token_seconds_per_request
    return min(1.0, serial / request_seconds(inputs, inputs.response))


def all_splits(nodes: int, gpus: int) -> list[GpuSplit]:
    """Every split of a node's GPUs, the same on all nodes, with both roles on every node."""
    return [GpuSplit(nodes, nodes * engines, nodes * (gpus - engines)) for engines in range(gpus - 1, 0, -1)]


def colocated_split(nodes: int, gpus: int) -> GpuSplit:
    """All GPUs generate, then all train, as a synchronous loop can; switching costs nothing."""
    return GpuSplit(nodes, nodes * gpus, nodes * gpus, colocated=True)


def make_settings(
    inputs: SimulationInputs, split: GpuSplit, mode: str, stepping: str, amount: SimulationLength
) -> SimulationSettings:
    """Settings with one engine per GPU and the agents spread over the engines."""
    return SimulationSettings(
        mode=mode,
        stepping=stepping,
        max_staleness=int(inputs.max_staleness),
        groups_per_update=split.nodes * inputs.batch // inputs.group_size,
        groups_in_flight=math.ceil(split.nodes * inputs.agents / inputs.group_size / split.engines),
        engines=split.engines,
        updates=amount.updates,
        warmup_updates=amount.warmup_updates,
        serial=serial_share(inputs),
        nodes=split.nodes,
        cores=int(inputs.cores),
    )


def make_update_times(inputs: SimulationInputs, split: GpuSplit) -> UpdateTimes:
    """Training is spread evenly; each trainer GPU sends the weights to its share of the engines, one by one."""
    receivers = 1.0 if split.colocated else max(1.0, split.engines / split.trainers)
    sync = receivers * inputs.weights_gb / inputs.link_gb_per_second
    return UpdateTimes(inputs.training_passes / (inputs.train_tokens_per_second * split.trainers), sync, sync)


def predict_cluster(
    inputs: SimulationInputs,
    split: GpuSplit,
    mode: str = "async",
    stepping: str = "free",
    amount: SimulationLength = FULL,
    seed: int = 0,
) -> ClusterPrediction:
    """Simulate one cluster."""
    settings = make_settings(inputs, split, mode, stepping, amount)
    result = simulate(settings, RandomWorkload(inputs), [make_update_times(inputs, split)], seed)
    return ClusterPrediction(split, mode, stepping, settings.staleness, result)


def recommended_prediction(predictions: Sequence[ClusterPrediction]) -> ClusterPrediction:
    """The split with the most engines among those within RECOMMENDATION_MARGIN of the highest throughput.

    Response and page times are the least certain inputs: spare engines tolerate errors in them and cost nothing here.
    """
    most = max(one.result.per_hour for one in predictions)
    return max(
        (one for one in predictions if one.result.per_hour >= (1 - RECOMMENDATION_MARGIN) * most),
        key=lambda one: one.split.engines,
    )
