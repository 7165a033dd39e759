"""Tasks of offline websites: a pure function of the host, so that servers and tools agree without sharing files."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megatron_webrl.tasks.offline.hosts import Website, get_website
from megatron_webrl.tasks.offline.questions import QUESTIONS
from megatron_webrl.tasks.sites.app import App
from megatron_webrl.tasks.sites.catalog import ENVIRONMENTS
from megatron_webrl.tasks.sites.content_generator import sign_in_instruction
from megatron_webrl.tasks.sites.goal import DrawGoal, Goal, act_unobstructed
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, HighLevelAction, PageLinks

DONE_ANSWER = "done"  # of tasks that ask for effects
DRAWS_PER_KIND = 2
# Kinds that differ from the rest in what they assume: these are orders of someone who is signed out at the start.
_SIGNED_OUT_KINDS = ("shop-buy-item", "shop-order-list")


@dataclass(frozen=True)
class WebsiteGoal:
    """One task of a website. Its instruction names the host; its script ends with an answer."""

    host: str
    kind: str  # such as "shop-find-price"
    goal: Goal

    @property
    def url(self) -> str:
        """Address of the start page."""
        return f"http://{self.host}{self.goal.start_path}"

    @property
    def answer(self) -> str:
        """The text that the agent must answer with."""
        return self.goal.answer if self.goal.answer is not None else DONE_ANSWER


@lru_cache(maxsize=256)
def website_goals(host: str) -> Mapping[str, WebsiteGoal]:
    """The tasks of a host by instruction, of kinds that name facts. Raises KeyError for a host without a website."""
    website = get_website(host)
    goals: dict[str, WebsiteGoal] = {}
    for kind, needs_login, draw_goal in _kinds(website.app_class):
        if kind in _SIGNED_OUT_KINDS and website.start.signed_in:
            continue
        for number in range(DRAWS_PER_KIND):
            drawn = draw_goal(random.Random(f"offline/{host}/{kind}/{number}"), website.data)
            if drawn is not None and drawn.facts:
                goal = _for_website(website, drawn, needs_login or drawn.signed_in)
                goals.setdefault(goal.instruction, WebsiteGoal(host, kind, goal))
    return goals


def website_goal(host: str, instruction: str) -> WebsiteGoal:
    """The task of a host with this instruction. Raises KeyError."""
    return website_goals(host)[instruction]


def _kinds(app_class: type[App]) -> Iterator[tuple[str, bool, DrawGoal]]:
    """Name, whether sign-in is needed, and how to draw a goal."""
    for name, environment in ENVIRONMENTS.items():
        if environment.app_class is app_class:
            yield name, environment.difficulty == "hard", environment.draw_goal
    for draw_goal in QUESTIONS[app_class.name]:
        name = f"{app_class.name}-{draw_goal.__name__.replace('_', '-')}"
        yield name, app_class.login_required, draw_goal


def _for_website(website: Website, goal: Goal, needs_login: bool) -> Goal:
    """The goal with a whole instruction, and a script that copes with the website's initial state."""
    needs_login = needs_login and not website.start.signed_in
    parts = [
        f"On {website.host}:",
        sign_in_instruction(website.data.account) if needs_login else "",
        goal.instruction,
        f'When you are done, answer with "{DONE_ANSWER}".' if goal.effects else "",
    ]
    return replace(
        goal,
        instruction=" ".join(part for part in parts if part),
        scripted_policy=partial(_act, goal, needs_login),
    )


def _act(goal: Goal, needs_login: bool, app: App, view: PageLinks) -> HighLevelAction:
    if goal.effects and Counter(app.effects) == Counter(goal.effects):
        return GiveAnswer(DONE_ANSWER)
    return act_unobstructed(goal.scripted_policy, needs_login, app, view)
