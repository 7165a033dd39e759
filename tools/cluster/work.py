"""What a simulation is fed with: settings of the system, work of the episodes, times of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

UNLIMITED_CORES = 10**9


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step of an episode."""

    generation: float  # seconds of an engine that has no other request
    browser: float  # seconds
    prompt: int  # tokens
    response: int
    cpu: float = 0.0  # core-seconds before the browser's seconds


@dataclass(frozen=True, slots=True)
class EpisodeWork:
    """One episode, whatever happens around it."""

    reset: float  # seconds before the first prompt
    steps: tuple[StepWork, ...]
    trainable: bool = True  # False: masked


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The episodes of one ticket, and what the trainer would drop it for even if it came in time."""

    episodes: tuple[EpisodeWork, ...]
    drop_reason: str | None = None  # all_failed, masked, ...


class Workload(Protocol):
    """Where groups come from."""

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """The group of a ticket; `rng` is the ticket's own."""
        ...


@dataclass(frozen=True)
class RecordedWorkload:
    """Groups that a run had, or that a test lists."""

    groups: Sequence[GroupWork]
    index_by_ticket: Mapping[int, int] = field(default_factory=dict)  # of tickets among the groups

    def draw(self, ticket: int, rng: np.random.Generator) -> GroupWork:
        """What the ticket was, or any of the groups where that is not known."""
        place = self.index_by_ticket.get(ticket)
        return self.groups[int(rng.integers(len(self.groups))) if place is None else place]


@dataclass(frozen=True)
class UpdateTimes:
    """How long the trainer takes: one update's times."""

    seconds_per_token: float  # prompts and responses of the batch, each counted once
    sync: float  # seconds: weights to the engines
    pause: float  # of these the last, in which the engines stand still
    other: float = 0.0  # seconds between the update's record and the next wait: accounts, checkpoints


@dataclass(frozen=True)
class SimulationSettings:
    """The system. Modes and stepping are those of docs/rollout.md."""

    mode: str
    groups_per_update: int
    groups_in_flight: int  # of an engine
    engines: int
    updates: int
    max_staleness: int = 2  # for async
    stepping: str = "free"
    serial: float = 0.0  # share of a request's work that an engine does for one request at a time
    overlap: float = 1.0  # speed of the engines while the trainer trains: below 1 where they share processors
    nodes: int = 1
    cores: int = UNLIMITED_CORES  # of each node, for browsers
    warmup_updates: int = 1  # updates at the beginning that no figure counts

    @property
    def staleness(self) -> int:
        """Versions that the oldest token of a trained group may lag behind."""
        return {"async": self.max_staleness, "one_step_off": 1, "sync": 0}[self.mode]

    @property
    def updates_ahead(self) -> int:
        """Updates whose groups may be begun before their turn, while groups are collected."""
        return self.max_staleness if self.mode == "async" else 0


def engine_rate(serial: float) -> Callable[[int], float]:
    """What each of n requests of an engine gets done in a second: 1 alone, and 1/serial for all of many together.

    An iteration of the engine is as long for one request as for many, but for the serial share, which it does for
    each of them: prefill, and a little of every token. So n requests take 1 + (n - 1) serial times as long as one.
    """
    return lambda count: 1 / (1 + (count - 1) * serial)


def core_rate(cores: int) -> Callable[[int], float]:
    """What each of n runnable processes gets done in a second on some cores."""
    return lambda count: 1.0 if count <= cores else cores / count
