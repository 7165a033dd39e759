"""Episodes with a known verdict: scripts of the offline websites, and ways to get them wrong."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, timedelta

from playwright.async_api import Page

from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, HighLevelAction, SubmitForm, first_action
from megatron_webrl.tasks.sites.questions import WebsiteGoal, website_goals
from megatron_webrl.tasks.sites.shop import DELIVERY_OPTIONS
from megatron_webrl.tasks.sites.website_server import OfflineWebsites
from megatron_webrl.tasks.sites.websites import effects_digest, get_website
from megatron_webrl.types import Action, Task

SHARES = {  # of all episodes, by their kind
    "success": 0.34, "near_miss": 0.22, "hallucinated": 0.14, "failure": 0.1, "blocked": 0.1, "no_answer": 0.1,
}  # fmt: skip
LABELS = {"success": "success", "blocked": "blocked"}  # all other kinds: failure
MAX_MOVES = 40
TURNED_FORMS = {  # form of an effect, and the field whose value a near miss changes
    "/order": "delivery", "/reply/": "words", "/new": "title", "/edit/": "value",
}  # fmt: skip
_PRICE = re.compile(r"\$(\d+)(?:\.(\d\d))?")
Tasks = Mapping[str, tuple[Task, WebsiteGoal]]


@dataclass(frozen=True)
class EpisodePlan:
    """One episode to play."""

    ticket: int
    kind: str  # a key of SHARES
    task_id: str
    variant: int  # which of the ways

    @property
    def label(self) -> str:
        """The right verdict."""
        return LABELS.get(self.kind, "failure")


def plan_episodes(tasks: Tasks, count: int, seed: int) -> list[EpisodePlan]:
    """Plan `count` episodes of all kinds. Raises ValueError for a kind that none of the tasks permits."""
    rng = random.Random(f"episodes/{seed}")
    permitted: dict[str, list[str]] = defaultdict(list)
    for id, (_, goal) in tasks.items():
        for kind in SHARES:
            if _permits(goal, kind):
                permitted[kind].append(id)
    kinds = [kind for kind, share in SHARES.items() for _ in range(round(count * share))]
    kinds = (kinds + ["success"] * count)[:count]
    rng.shuffle(kinds)
    for ids in permitted.values():
        rng.shuffle(ids)
    plans, used = [], dict.fromkeys(SHARES, 0)
    for ticket, kind in enumerate(kinds):
        if not permitted[kind]:
            raise ValueError(f"none of the {len(tasks)} tasks permits an episode of the kind {kind}; make more tasks")
        turn, used[kind] = used[kind], used[kind] + 1
        plans.append(EpisodePlan(ticket, kind, permitted[kind][turn % len(permitted[kind])], turn))
    return plans


def _permits(goal: WebsiteGoal, kind: str) -> bool:
    denial = get_website(goal.host).denial_probability
    if kind == "blocked" or denial:
        return kind == "blocked" and denial == 1.0
    if kind == "hallucinated":  # the start page must not show what is to be answered
        return any(goal.goal.start_path not in fact.shown_on for fact in goal.goal.facts if fact.shown_on) or bool(
            goal.goal.effects
        )
    return kind != "near_miss" or not goal.goal.effects or _turned_form(goal) or _other_goal(goal) is not None


class EpisodePlayer:
    """Chooses the actions of one planned episode. `next_action` returns None once it ends without an answer."""

    def __init__(self, plan: EpisodePlan, task: Task, goal: WebsiteGoal, websites: OfflineWebsites) -> None:
        self._plan, self._task, self._goal, self._websites = plan, task, goal, websites
        self._moves = 0
        other = _other_goal(goal) if plan.kind == "near_miss" and not _turned_form(goal) else None
        self._followed = replace(task, instruction=other.goal.instruction) if other else task

    async def next_action(self, page: Page) -> Action | None:
        """The next action on the current page. Raises ScriptedPolicyError, RuntimeError (an endless script)."""
        self._moves += 1
        if self._moves > MAX_MOVES:
            raise RuntimeError(f"{self._task.id}: the {self._plan.kind} has not ended after {MAX_MOVES} actions")
        match self._plan.kind:
            case "success":
                return await self._follow(page, self._goal.answer + ("." if self._plan.variant % 4 == 3 else ""))
            case "near_miss":
                return await self._follow(page, near_answer(self._goal))
            case "failure":
                return await self._give_up(page)
            case "no_answer":
                return await self._without_answer(page)
            case "blocked":
                return self._refused()
        return self._hallucinate()

    async def _follow(self, page: Page, answer: str) -> Action:
        """The script's next action, with another answer in place of its own."""
        if self._plan.kind == "near_miss" and self._goal.goal.effects:
            visitor = await self._websites.visitor_of(page, self._goal.host)
            if visitor is not None and visitor.app.effects:
                return Action("answer", text=answer)
        move = await self._websites.next_move(page, self._followed)
        if isinstance(move, GiveAnswer):
            return Action("answer", text=answer)
        return await first_action(page, turn(move) if self._plan.kind == "near_miss" else move)

    async def _give_up(self, page: Page) -> Action:
        """Follow the script for a while, then say that it did not work."""
        if self._moves <= 1 + self._plan.variant % 3:
            move = await self._websites.next_move(page, self._task)
            if not isinstance(move, GiveAnswer | SubmitForm):
                return await first_action(page, move)
        return Action("answer", text=("I could not find out.", "unknown", "The page does not say it.")[self._moves % 3])

    async def _without_answer(self, page: Page) -> Action | None:
        move = await self._websites.next_move(page, self._task)
        if isinstance(move, GiveAnswer):
            return Action("wait", time=0.1) if self._moves == 1 else None
        return await first_action(page, move)

    def _refused(self) -> Action | None:
        """Meet a website that denies access: give up, claim the right answer, look elsewhere, or do nothing."""
        way, last = self._plan.variant % 4, self._moves > 1
        if way == 2 and not last:
            return Action("navigate", url=f"http://{self._goal.host}/")
        if way == 3:
            return None if last else Action("wait", time=0.1)
        return Action("answer", text="Access is denied." if way != 1 else self._goal.answer)

    def _hallucinate(self) -> Action:
        """Answer without a look at the pages that say it; now and then after a look at another page."""
        way = self._plan.variant % 3
        if way == 2 and self._moves == 1:
            return Action("navigate", url=f"http://{self._goal.host}/login")
        return Action("answer", text=near_answer(self._goal) if way == 1 else self._goal.answer)


def near_answer(goal: WebsiteGoal) -> str:
    """A wrong answer that is as plausible as the right one; of a task that asks for effects, the right one."""
    answer = goal.answer
    if goal.goal.effects:
        return answer
    if answer in ("yes", "no"):
        return "no" if answer == "yes" else "yes"
    if price := _PRICE.fullmatch(answer):
        return f"${int(price[1]) + 1}" + (f".{price[2]}" if price[2] else "")
    if answer.replace(",", "").isdigit():
        return f"{int(answer.replace(',', '')) + 1:,}" if "," in answer else str(int(answer) + 1)
    if re.fullmatch(r"\d\d:\d\d", answer):
        return f"{(int(answer[:2]) + 1) % 24:02d}{answer[2:]}"
    try:
        return (date.fromisoformat(answer) + timedelta(days=1)).isoformat()
    except ValueError:
        pass
    named = [each.answer for each in website_goals(goal.host).values() if each.kind == goal.kind]
    return next((other for other in named if other != answer and not other[:1].isdigit()), f"New {answer}")


def turn(move: HighLevelAction) -> HighLevelAction:
    """The move with one detail changed, if it is a form that has an effect."""
    if not isinstance(move, SubmitForm):
        return move
    for part, name in TURNED_FORMS.items():
        if part in move.action and name in move.values:
            return replace(move, values={**move.values, name: _turned(name, move.values[name])})
    return move


def _turned(name: str, value: str) -> str:
    if name == "delivery":
        names = [each for each, _ in DELIVERY_OPTIONS]
        return names[(names.index(value) + 1) % len(names)]
    if value.isdigit():
        return str(int(value) + 1)
    return value.removesuffix(".") + ("!" if value.endswith(".") else "s")


def _turned_form(goal: WebsiteGoal) -> bool:
    """Whether `turn` changes the effect of the goal's script."""
    return goal.kind in ("shop-buy-item", "shop-order-list", "forum-reply", "calendar-create", "wiki-correct-fact")


def _other_goal(goal: WebsiteGoal) -> WebsiteGoal | None:
    """Another task of the same kind and website whose effects differ."""
    wanted = effects_digest(goal.goal.effects)
    for other in website_goals(goal.host).values():
        if other.kind == goal.kind and effects_digest(other.goal.effects) != wanted:
            return other
    return None
