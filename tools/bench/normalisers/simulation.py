"""Lengths and outcomes of scripted episodes with their mistakes, without a browser or a model.

The pages are those of configs/normalisers.yaml, reduced to what decides when an episode ends: which actions are left,
and what repeating the last one does. They follow the pages of MiniWoB++ 1.1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from megatron_webrl.config.trainer import WarmStartConfig
from megatron_webrl.rollout.demonstrations import ScriptedMistakes
from tools.bench.normalisers.gates import EpisodeLength


class SimulatedPage(Protocol):
    """A page that ends at Submit."""

    @property
    def is_done(self) -> bool:
        """Whether Submit would succeed."""
        ...

    def act(self) -> None:
        """The script's next action, or its last one again once the work is done."""
        ...


class Drawing:
    """A drawing to click; a second click at the same place changes nothing."""

    def __init__(self) -> None:
        self.is_done = False

    def act(self) -> None:
        self.is_done = True


class Section:
    """A section to unfold; a second click folds it."""

    def __init__(self) -> None:
        self.is_done = False

    def act(self) -> None:
        self.is_done = not self.is_done


PAGES: dict[str, Callable[[], SimulatedPage]] = {
    "click-collapsible": Section, "circle-center": Drawing, "bisect-angle": Drawing, "right-angle": Drawing,
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
            simulate_episode(make_page(), ScriptedMistakes(settings, f"{seed}/{number}/{member}"), horizon)
            for member in range(group_size)
        ])  # fmt: skip
    return found
