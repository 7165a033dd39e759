"""Clusters that nobody has measured: their work and settings from inputs, and a simulation of each split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.cluster.inputs import Inputs
from tools.cluster.simulation import Result, simulate
from tools.cluster.work import Cycle, Episode, GroupWork, Settings, Step

LIMITS = (10, 20, 30)  # steps by difficulty
MARGIN = 0.05  # a split this close to the best is as good


@dataclass(frozen=True)
class Split:
    """GPUs of all nodes by their role; `shared`: all of them take turns in both."""

    nodes: int
    engines: int
    trainers: int
    shared: bool = False

    def __str__(self) -> str:
        return "all, in turns" if self.shared else f"{self.engines}:{self.trainers}"


@dataclass(frozen=True)
class Amount:
    """How long a simulated run is."""

    updates: int
    uncounted: int


FULL = Amount(updates=20, uncounted=4)
QUICK = Amount(updates=6, uncounted=2)


@dataclass(frozen=True)
class Prediction:
    """A simulated cluster."""

    split: Split
    mode: str
    stepping: str
    max_staleness: int
    result: Result


@dataclass(frozen=True)
class Drawn:
    """Groups of tasks with a success rate of their own; who fails uses up the steps that there are.

    A group without a success or without a failure is dropped, with Inputs.drop.
    """

    inputs: Inputs

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The next group."""
        given = self.inputs
        rate = rng.beta(given.success * given.spread, (1 - given.success) * given.spread)
        limit = LIMITS[int(rng.choice(3, p=(1 - given.medium - given.hard, given.medium, given.hard)))]
        succeeds = rng.random(given.group_size) < rate
        lengths = np.where(succeeds, np.minimum(rng.geometric(1 / given.steps_success, given.group_size), limit), limit)
        episodes = tuple(self._episode(rng, int(length)) for length in lengths)
        if not given.drop or 0 < succeeds.sum() < given.group_size:
            return GroupWork(episodes)
        return GroupWork(episodes, "all_succeeded" if succeeds.all() else "all_failed")

    def _episode(self, rng: np.random.Generator, length: int) -> Episode:
        given = self.inputs
        waits = given.browser * np.exp(given.browser_sigma * rng.standard_normal(length + 1))
        waits = np.minimum(waits, given.browser_limit).tolist()
        center = math.log(given.response) - given.response_sigma**2 / 2
        responses = np.exp(center + given.response_sigma * rng.standard_normal(length)).round().astype(int).tolist()
        prompt = round(given.prompt)
        steps = tuple(
            Step(request_seconds(given, response), wait, prompt, response, given.browser_cpu)
            for response, wait in zip(responses, waits[1:], strict=True)
        )
        return Episode(waits[0], steps)


def request_seconds(inputs: Inputs, response: float) -> float:
    """Of an engine with nothing else to do."""
    return inputs.prompt / inputs.prefill + response * inputs.token_seconds


def serial_share(inputs: Inputs) -> float:
    """Share of a mean request that an engine does for one request at a time: prefill, and a little of every token."""
    serial = inputs.prompt / inputs.prefill + inputs.response * inputs.token_serial
    return min(1.0, serial / request_seconds(inputs, inputs.response))


def splits(nodes: int, gpus: int) -> list[Split]:
    """Every share of each node's GPUs, the same on all nodes: both roles are on every node."""
    return [Split(nodes, nodes * engines, nodes * (gpus - engines)) for engines in range(gpus - 1, 0, -1)]


def together(nodes: int, gpus: int) -> Split:
    """All GPUs generate, then all train: what a loop that waits can do. Changing over is taken to cost nothing."""
    return Split(nodes, nodes * gpus, nodes * gpus, shared=True)


def settings_of(inputs: Inputs, split: Split, mode: str, stepping: str, amount: Amount) -> Settings:
    """One engine a GPU, and agents shared out over them."""
    return Settings(
        mode=mode,
        stepping=stepping,
        max_staleness=int(inputs.max_staleness),
        groups_per_update=split.nodes * inputs.batch // inputs.group_size,
        groups_in_flight=math.ceil(split.nodes * inputs.agents / inputs.group_size / split.engines),
        engines=split.engines,
        updates=amount.updates,
        uncounted=amount.uncounted,
        serial=serial_share(inputs),
        nodes=split.nodes,
        cores=int(inputs.cores),
    )


def cycle_of(inputs: Inputs, split: Split) -> Cycle:
    """Training is shared out evenly; a trainer's GPU sends to as many engines as there are for each, one by one."""
    receivers = 1.0 if split.shared else max(1.0, split.engines / split.trainers)
    sync = receivers * inputs.weights / inputs.link
    return Cycle(inputs.passes / (inputs.train * split.trainers), sync, sync)


def predict(
    inputs: Inputs, split: Split, mode: str = "async", stepping: str = "free", amount: Amount = FULL, seed: int = 0
) -> Prediction:
    """Simulate one cluster."""
    settings = settings_of(inputs, split, mode, stepping, amount)
    result = simulate(settings, Drawn(inputs), [cycle_of(inputs, split)], seed)
    return Prediction(split, mode, stepping, settings.staleness, result)


def recommended(predictions: Sequence[Prediction]) -> Prediction:
    """Of the splits within MARGIN of the most trajectories an hour the one with the most engines.

    What is known least is how long answers and pages take: spare engines forgive it, and cost nothing there.
    """
    most = max(one.result.per_hour for one in predictions)
    return max(
        (one for one in predictions if one.result.per_hour >= (1 - MARGIN) * most), key=lambda one: one.split.engines
    )
