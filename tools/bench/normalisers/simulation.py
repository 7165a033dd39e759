"""Lengths and outcomes of scripted episodes with their mistakes, without a browser or a model.

The pages are those of configs/normalisers.yaml, reduced to what decides when an episode ends: whether the work is done,
and what repeating it does. They follow the pages of MiniWoB++ 1.1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.trainer import WarmStartConfig
from megatron_webrl.rollout.demonstrations import ScriptedMistakes
from tools.bench.normalisers.gates import EpisodeLength

PAGES = {"click-collapsible": True, "circle-center": False, "bisect-angle": False, "right-angle": False}
"""Whether a second click undoes the first, which folds the section again; in a drawing it changes nothing."""


@dataclass
class SimulatedPage:
    """A page whose work is one click, and that ends at Submit."""

    click_undoes: bool
    is_done: bool = False  # whether Submit would succeed

    def act(self) -> None:
        """The script's next action, or its last one again once the work is done."""
        self.is_done = not (self.is_done and self.click_undoes)


def simulate_episode(page: SimulatedPage, mistakes: ScriptedMistakes, horizon: int) -> EpisodeLength:
    """One episode of the script with its mistakes, as `ScriptedGenerator` plays it."""
    for step in range(1, horizon + 1):
        if mistakes.submits_early():
            return EpisodeLength(step, page.is_done)
        if not page.is_done:
            page.act()
            continue
        choice = mistakes.instead_of_submit()
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
        undoes = list(PAGES.values())[number % len(PAGES)]
        found.append([
            simulate_episode(SimulatedPage(undoes), ScriptedMistakes(settings, f"{seed}/{number}/{member}"), horizon)
            for member in range(group_size)
        ])  # fmt: skip
    return found
