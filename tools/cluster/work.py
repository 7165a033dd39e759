"""Inputs of a simulation: settings of the system, work of the episodes, times of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

UNLIMITED_CORES = 10**9


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step of an episode."""

    generation: float  # seconds in an engine without other requests
    browser: float  # seconds
    prompt: int  # tokens
    response: int
    cpu: float = 0.0  # core-seconds before the browser's seconds


@dataclass(frozen=True, slots=True)
class EpisodeWork:
    """The work of one episode."""

    reset: float  # seconds before the first prompt
    steps: tuple[StepWork, ...]
    trainable: bool = True  # False: masked


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The episodes of one ticket, and the reason for which the trainer drops the group in any case."""

    episodes: tuple[EpisodeWork, ...]
    drop_reason: str | None = None  # all_failed, masked, ...


class Workload(Protocol):
    """Source of groups."""

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The group of a ticket; `rng` belongs to the ticket."""
        ...


@dataclass(frozen=True)
class RecordedWorkload:
    """The groups of a recorded run."""

    groups: Sequence[GroupWork]
    index_by_ticket: Mapping[int, int] = field(default_factory=dict)  # ticket -> index in `groups`

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The recorded group of the ticket, or a random one for an unknown ticket."""
        index = self.index_by_ticket.get(ticket)
        return self.groups[int(rng.integers(len(self.groups))) if index is None else index]


@dataclass(frozen=True)
class UpdateTimes:
    """Times of one update."""

    seconds_per_token: float  # of training; per token of prompts and responses of the batch
    sync: float  # seconds: weights to the engines
    pause: float  # the last part of sync, in which the engines are paused
    other: float = 0.0  # seconds from the update's record to the next wait: accounting, checkpoints


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of the system; docs/rollout.md explains modes and stepping."""

    mode: str
    groups_per_update: int
    groups_in_flight: int  # per engine
    engines: int
    updates: int
    max_staleness: int = 2  # for async
    stepping: str = "free"
    serial: float = 0.0  # fraction of a request's work that an engine does one request at a time
    overlap: float = 1.0  # relative engine speed while the trainer trains; below 1 if they share processors
    nodes: int = 1
    cores: int = UNLIMITED_CORES  # per node, for browsers
    warmup_updates: int = 1  # first updates, left out of all figures

    @property
    def staleness(self) -> int:
        """Maximum staleness, in versions, of the oldest token of a trained group."""
        return {"async": self.max_staleness, "one_step_off": 1, "sync": 0}[self.mode]

    @property
    def updates_ahead(self) -> int:
        """Updates whose groups may start early while groups are collected."""
        return self.max_staleness if self.mode == "async" else 0


def engine_rate(serial: float) -> Callable[[int], float]:
    """Work per second of each of n requests of an engine: 1 for a single request, 1 / (1 + (n - 1) serial) for n.

    An iteration of the engine takes the same time for one request as for many, except for the serial fraction, which
    it repeats for each of them: prefill, and a little of every token.
    """
    return lambda count: 1 / (1 + (count - 1) * serial)


def core_rate(cores: int) -> Callable[[int], float]:
    """CPU seconds per second of each of n runnable processes."""
    return lambda count: 1.0 if count <= cores else cores / count
