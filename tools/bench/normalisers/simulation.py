"""Lengths and outcomes of scripted episodes with their mistakes, without a browser or a model.

The pages are those of configs/normalisers.yaml, reduced to what decides when an episode ends: which actions are left,
and what repeating the last one does. They follow the pages of MiniWoB++ 1.1.0.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from megatron_webrl.config.trainer import WarmStartConfig
from megatron_webrl.rollout.demonstrations import ScriptedMistakes
from tools.bench.normalisers.gates import EpisodeLength


class SimulatedPage(Protocol):
    """A page that ends at Submit."""

    @property
    def is_done(self) -> bool:
        """Whether Submit gives the full reward."""
        ...

    def act(self) -> None:
        """The script's next action, or its last one again once the work is done."""
        ...


class GenerateNumber:
    """Generate draws 0..10; the number must be below 5..8, above 2..5, odd, or even."""

    def __init__(self, seed: random.Random) -> None:
        self._random, kind, limit = seed, seed.randrange(4), seed.randrange(4)
        self._fits: Callable[[int], bool] = (
            lambda number: number < 5 + limit, lambda number: number > 2 + limit,
            lambda number: number % 2 == 1, lambda number: number % 2 == 0,
        )[kind]  # fmt: skip
        self._number: int | None = None

    @property
    def is_done(self) -> bool:
        return self._number is not None and self._fits(self._number)

    def act(self) -> None:
        self._number = self._random.randrange(11)


class UseSpinner:
    """Up or down, one at a time, from 0 to -10..9; once more goes too far, and the script goes back."""

    def __init__(self, seed: random.Random) -> None:
        self._missing, self._last = seed.randrange(-10, 10), 0

    @property
    def is_done(self) -> bool:
        return self._missing == 0

    def act(self) -> None:
        if self._missing:
            self._last = 1 if self._missing > 0 else -1
        self._missing -= self._last


class OddOrEven:
    """Three rows to mark; marking one again changes nothing."""

    def __init__(self, seed: random.Random) -> None:
        self._left = 3

    @property
    def is_done(self) -> bool:
        return not self._left

    def act(self) -> None:
        self._left = max(0, self._left - 1)


class ClickCheckboxes:
    """2..6 boxes, each to be checked with probability 1/2; a second click unchecks one."""

    def __init__(self, seed: random.Random) -> None:
        self._wrong = sum(seed.random() < 0.5 for _ in range(seed.randrange(2, 7)))

    @property
    def is_done(self) -> bool:
        return not self._wrong

    def act(self) -> None:
        self._wrong = self._wrong - 1 if self._wrong else 1


PAGES: dict[str, Callable[[random.Random], SimulatedPage]] = {
    "generate-number": GenerateNumber, "use-spinner": UseSpinner, "odd-or-even": OddOrEven,
    "click-checkboxes": ClickCheckboxes,
}  # fmt: skip


def simulate_episode(page: SimulatedPage, mistakes: ScriptedMistakes, horizon: int) -> EpisodeLength:
    """One episode of the script with its mistakes, as `ScriptedGenerator` plays it."""
    has_worked = False
    for step in range(1, horizon + 1):
        if mistakes.submits_early():
            return EpisodeLength(step, page.is_done)
        if not page.is_done:
            page.act()
            has_worked = True
            continue
        choice = mistakes.instead_of_submit() if has_worked else None
        if choice is None:
            return EpisodeLength(step, True)
        if choice == "repeat":
            page.act()
    return EpisodeLength(horizon, False)


def simulate_groups(
    settings: WarmStartConfig, horizon: int, groups: int, group_size: int = 8, seed: int = 0
) -> list[list[EpisodeLength]]:
    """Groups of episodes of one page each, of every environment in turn. [groups][group_size]"""
    found = []
    for number in range(groups):
        make_page = list(PAGES.values())[number % len(PAGES)]
        found.append([
            simulate_episode(
                make_page(random.Random(f"{seed}/{number}")), ScriptedMistakes(settings, f"{seed}/{number}/{member}"),
                horizon,
            )
            for member in range(group_size)
        ])  # fmt: skip
    return found
