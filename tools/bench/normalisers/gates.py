"""Conditions under which the experiment can show the effect at all. Pure functions.

The constant normaliser gives the tokens of long failures more weight than 1/|tau| does. This can only matter if
failures are the longer ones; and a policy whose entropy explodes, or gradients that are scaled down, would hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

LONGER_FAILURES = 0.7  # least share of the first batch's mixed groups
ENTROPY_GROWTH = 1.2  # most, as a multiple of the start
FORMAT_ERRORS = 0.05  # below this share of steps
CLIPPED_STEPS = 0.1  # below this share of optimiser steps
INITIAL_SUCCESS = (0.35, 0.6)  # of the initial policy at temperature 1
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


def share_with_longer_failures(groups: Sequence[Sequence[EpisodeLength]]) -> float | None:
    """Share of the mixed groups whose failures have more steps than their successes, by their means; None without one.

    groups: [groups][episodes]; a mixed group has successes and failures.
    """
    longer = []
    for group in groups:
        successes = [episode.steps for episode in group if episode.success]
        failures = [episode.steps for episode in group if not episode.success]
        if successes and failures:
            longer.append(fmean(failures) > fmean(successes))
    return fmean(longer) if longer else None


def mean_steps(groups: Sequence[Sequence[EpisodeLength]]) -> float:
    """Mean steps of all episodes: k of the constant normaliser, rounded. Raises StatisticsError without an episode."""
    return fmean(episode.steps for group in groups for episode in group)


def check_gates(first_batch: Sequence[Sequence[EpisodeLength]], updates: Sequence[UpdateFigures]) -> list[Gate]:
    """The gates of one run.

    first_batch: the groups of the first update, [groups][episodes]. updates: all of them, in order; without one, the
    last three gates have no value and fail.
    """
    last = updates[-LAST_UPDATES:]
    growth = fmean(update.entropy for update in last) / updates[0].entropy if updates else None
    errors = fmean(update.format_error_rate for update in updates) if updates else None
    clipped = fmean(update.gradient_clipped for update in updates) if updates else None
    longer = share_with_longer_failures(first_batch)
    return [
        Gate("groups with longer failures", longer, f">= {LONGER_FAILURES}",
             longer is not None and longer >= LONGER_FAILURES),
        Gate("entropy, last updates / first", growth, f"<= {ENTROPY_GROWTH}",
             growth is not None and growth <= ENTROPY_GROWTH),
        Gate("format errors", errors, f"< {FORMAT_ERRORS}", errors is not None and errors < FORMAT_ERRORS),
        Gate("clipped optimiser steps", clipped, f"< {CLIPPED_STEPS}", clipped is not None and clipped < CLIPPED_STEPS),
    ]  # fmt: skip


def check_initial_policy(successes: int, episodes: int) -> Gate:
    """The gate of the pilot: the initial policy succeeds often enough for mixed groups, and not too often."""
    low, high = INITIAL_SUCCESS
    value = successes / episodes if episodes else None
    return Gate("success of the initial policy", value, f"{low} to {high}", value is not None and low <= value <= high)
