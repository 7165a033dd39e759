"""Goals of site tasks, and the environments that draw them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_webrl.tasks.sites.app import App, Effect, InitialSiteState, close_overlay, sign_in
from megatron_webrl.tasks.sites.content_generator import draw_initial_state, sign_in_instruction
from megatron_webrl.tasks.sites.high_level_actions import HighLevelAction, PageLinks, ScriptedPolicy


@dataclass(frozen=True)
class Fact:
    """One thing that a right answer establishes, or one property of the wanted effects."""

    text: str
    shown_on: tuple[str, ...] = ()  # paths of pages, each of which shows it; empty: it follows from the other facts


@dataclass(frozen=True)
class Goal:
    """The goal of one task: either exactly `effects` must happen, or `answer` must be given."""

    instruction: str
    start_path: str  # of the first page
    scripted_policy: ScriptedPolicy
    effects: tuple[Effect, ...] = ()
    answer: str | None = None
    signed_in: bool = False  # at the start of an easy or medium task
    app_options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the App
    facts: tuple[Fact, ...] = ()  # of a rubric; empty: the task cannot be written into a task file
    make_app: Callable[[], App] | None = None  # makes a new copy of the site; set by Environment.make_goal

    def __post_init__(self) -> None:
        assert bool(self.effects) != (self.answer is not None), "a goal has effects or an answer, and not both"


DrawGoal = Callable[[random.Random, Any], Goal | None]  # None if the content of the site has no such task


@dataclass(frozen=True)
class Environment:
    """Tasks of one kind. Medium and hard ones may have a cookie banner; hard ones also a popup, and require sign-in."""

    app_class: type[App]
    difficulty: str  # "easy", "medium" or "hard"
    generate_data: Callable[[random.Random], Any]
    draw_goal: DrawGoal

    def make_goal(self, rng: random.Random) -> Goal:
        goal = None
        while goal is None:
            data = self.generate_data(rng)
            goal = self.draw_goal(rng, data)
        hard = self.difficulty == "hard"
        if self.difficulty == "easy":
            start = InitialSiteState(goal.signed_in)
        else:
            start = draw_initial_state(rng, goal.signed_in, popup=hard)
        return replace(
            goal,
            instruction=f"{sign_in_instruction(data.account)} {goal.instruction}" if hard else goal.instruction,
            scripted_policy=partial(act_unobstructed, goal.scripted_policy, hard),
            make_app=partial(self.app_class, data, start, **goal.app_options),
        )


def act_unobstructed(policy: ScriptedPolicy, needs_login: bool, app: App, view: PageLinks) -> HighLevelAction:
    """Close popup and banner and sign in before the policy acts."""
    return close_overlay(app) or (sign_in(app, view) if needs_login else None) or policy(app, view)


def make_environments(
    app_class: type[App], generate_data: Callable[[random.Random], Any], **by_difficulty: Iterable[DrawGoal]
) -> dict[str, Environment]:
    """Environments of a site, named after site and function: shop-find-price for Shop and find_price."""
    return {
        f"{app_class.name}-{draw_goal.__name__.replace('_', '-')}": Environment(
            app_class, difficulty, generate_data, draw_goal
        )
        for difficulty, draws in by_difficulty.items()
        for draw_goal in draws
    }


def reward_and_done(goal: Goal, effects: list[Effect]) -> tuple[float | None, bool]:
    """Reward and end: 1 once exactly the wanted effects have happened, 0 with another one; answers are judged."""
    missing = Counter(goal.effects)
    missing.subtract(effects)
    if min(missing.values(), default=0) < 0:
        return 0.0, True
    return (1.0, True) if goal.effects and not any(missing.values()) else (None, False)


SITE_ERROR_RESULT = (math.nan, True)  # of an exception in the site: not a number, so that the judge masks it
