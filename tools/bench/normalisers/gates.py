"""Conditions under which the experiment can show the effect at all. Pure functions.

The constant normaliser gives the tokens of long failures more weight than 1/|tau| does. This can only matter if
failures are the longer ones; and a policy that falls apart, or gradients that are scaled down, would hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

LONGER_FAILURES = 0.6  # least share of the initial policy's pairs of a failure and a success
ENTROPY_GROWTH = 2.0  # most, as a multiple of the pilot's mean
FORMAT_ERRORS = 0.05  # below this share of steps
CLIPPED_STEPS = 0.1  # below this share of optimiser steps
INITIAL_SUCCESS = (0.25, 0.5)  # of the initial policy at temperature 1; half of the episodes cannot succeed
LAST_UPDATES = 5


@dataclass(frozen=True)
class EpisodeLength:
    """Steps and outcome of an episode."""

    steps: int
    success: bool


@dataclass(frozen=True)
class UpdateFigures:
    """What is kept of one update."""

    entropy: float  # nats
    format_error_rate: float  # share of steps
    gradient_clipped: float  # share of optimiser steps
    success: float | None  # share of all sampled episodes
    steps_failure: float | None  # None without a failure in the batch


@dataclass(frozen=True)
class Gate:
    """A condition, its value and whether it holds."""

    name: str
    value: float | None  # None: there was nothing to measure, and the gate fails
    condition: str
    passed: bool


def share_of_longer_failures(episodes: Sequence[EpisodeLength]) -> float | None:
    """Share of the pairs of a failure and a success whose failure has more steps; equal ones count half. None without
    a pair.
    """
    successes = np.array([episode.steps for episode in episodes if episode.success])
    failures = np.array([episode.steps for episode in episodes if not episode.success])
    if not len(successes) or not len(failures):
        return None
    return float((np.sign(failures[:, None] - successes) + 1).mean() / 2)


def mean_steps(groups: Sequence[Sequence[EpisodeLength]]) -> float:
    """Mean steps of all episodes: k of the constant normaliser, rounded. Raises StatisticsError without an episode."""
    return fmean(episode.steps for group in groups for episode in group)


def check_gates(updates: Sequence[UpdateFigures], pilot_entropy: float) -> list[Gate]:
    """The gates of one run. updates: all of them, in order; without one, no gate has a value, and all fail."""
    last = updates[-LAST_UPDATES:]
    growth = fmean(update.entropy for update in last) / pilot_entropy if updates else None
    errors = fmean(update.format_error_rate for update in updates) if updates else None
    clipped = fmean(update.gradient_clipped for update in updates) if updates else None
    return [
        Gate("entropy, last updates / pilot", growth, f"<= {ENTROPY_GROWTH}",
             growth is not None and growth <= ENTROPY_GROWTH),
        Gate("format errors", errors, f"< {FORMAT_ERRORS}", errors is not None and errors < FORMAT_ERRORS),
        Gate("clipped optimiser steps", clipped, f"< {CLIPPED_STEPS}", clipped is not None and clipped < CLIPPED_STEPS),
    ]  # fmt: skip


def check_initial_policy(episodes: Sequence[EpisodeLength]) -> list[Gate]:
    """The gates of the initial policy: it succeeds often enough, and not too often, and its failures are longer."""
    low, high = INITIAL_SUCCESS
    success = fmean(episode.success for episode in episodes) if episodes else None
    longer = share_of_longer_failures(episodes)
    return [
        Gate("success of the initial policy", success, f"{low} to {high}",
             success is not None and low <= success <= high),
        Gate("failures longer than successes", longer, f">= {LONGER_FAILURES}",
             longer is not None and longer >= LONGER_FAILURES),
    ]  # fmt: skip
