"""The offline websites as a task source."""

from __future__ import annotations

import random
import secrets
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.latency import EpisodeDelays, ResponseDelays
from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.tasks.sites import calendar, forms, forum, shop, wiki
from megatron_webrl.tasks.sites.app import App
from megatron_webrl.tasks.sites.goal import SITE_ERROR_RESULT, Environment, Goal, reward_and_done
from megatron_webrl.tasks.sites.high_level_actions import (
    HighLevelAction,
    PageLinks,
    ScriptedPolicy,
    first_action,
    read_page_links,
)
from megatron_webrl.tasks.source import LocalTaskSource, check_environments
from megatron_webrl.types import Action, Task

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page, Response

ENVIRONMENTS: dict[str, Environment] = {
    **shop.ENVIRONMENTS,
    **forum.ENVIRONMENTS,
    **calendar.ENVIRONMENTS,
    **wiki.ENVIRONMENTS,
    **forms.ENVIRONMENTS,
}

SITE_APPS: dict[str, type[App]] = {entry.app_class.name: entry.app_class for entry in ENVIRONMENTS.values()}


@lru_cache(maxsize=256)  # the episodes of a group share one
def get_goal(environment: str, seed: int) -> Goal:
    """The goal of an environment and a seed; equal on every machine. Raises KeyError."""
    return ENVIRONMENTS[environment].make_goal(random.Random(f"{environment}/{seed}"))


SOURCE_NAME = "sites"
SESSION_COOKIE = "session"
RESULT_HEADER = "webrl-result"  # reward of an episode that has ended, in the response that ended it and later ones


class SiteVisit:
    """One browser context's copy of a site, which a secret cookie identifies. Thread-safe."""

    def __init__(self, app: App, delays: ResponseDelays) -> None:
        self.app, self.secret = app, secrets.token_urlsafe(18)
        self._delays, self._lock = delays, threading.Lock()

    def handle_request(self, request: PageRequest) -> PageResponse:
        with self._lock:
            return replace(self._answer(request), delay=self._delays.next())

    def _answer(self, request: PageRequest) -> PageResponse:
        return self.app.handle_request(request)

    def next_move(self, policy: ScriptedPolicy, view: PageLinks) -> HighLevelAction:
        """The next action of a scripted policy on a page. Raises ScriptedPolicyError."""
        with self._lock:
            return policy(self.app, view)


class SiteEpisode(SiteVisit):
    """One episode's copy of a site."""

    def __init__(self, goal: Goal, site: str, delays: ResponseDelays) -> None:
        assert goal.make_app is not None, "the goal was not made by an Environment"
        super().__init__(goal.make_app(), delays)
        self.goal, self.site = goal, site
        self._failed = False
        self._replayed_reward: float | None = None

    def _answer(self, request: PageRequest) -> PageResponse:
        self._failed = True  # unless the site answers
        response = self.app.handle_request(request)
        self._failed = False
        reward, done = reward_and_done(self.goal, self.app.effects)
        return replace(response, headers={**response.headers, RESULT_HEADER: str(reward)}) if done else response

    def result(self) -> tuple[float | None, bool]:
        """Reward and end, from the effects so far. A replay has none: then from the recorded responses."""
        with self._lock:
            if self._failed:
                return SITE_ERROR_RESULT
            reward, done = reward_and_done(self.goal, self.app.effects)
        return (self._replayed_reward, True) if not done and self._replayed_reward is not None else (reward, done)

    def see_response(self, response: Response) -> None:
        """Take the result from a response that the page received."""
        if (reward := response.headers.get(RESULT_HEADER)) is not None:
            self._replayed_reward = float(reward)


class SiteTaskSource(LocalTaskSource):
    """Tasks of a list of site environments. A context manager; close stops the server."""

    def __init__(self, environments: Sequence[str], tasks: TasksConfig) -> None:
        """Raises ConfigError for an unknown environment."""
        check_environments("the sites have", environments, list(ENVIRONMENTS))
        difficulties = [ENVIRONMENTS[name].difficulty for name in environments]
        super().__init__(tasks, environments, difficulties, LocalServer(self._respond, "sites-server"))
        self._delays = EpisodeDelays(tasks.latency)
        self._lock = threading.Lock()
        # An episode is kept as long as its browser context, or any other reference to it, exists.
        self._episodes: weakref.WeakValueDictionary[str, SiteEpisode] = weakref.WeakValueDictionary()
        self._open: weakref.WeakKeyDictionary[BrowserContext, SiteEpisode] = weakref.WeakKeyDictionary()

    @property
    def origins(self) -> frozenset[str]:
        """The sites of the environments: pages can reach nothing else."""
        return frozenset(f"http://{host}" for host in self.addresses)

    @property
    def addresses(self) -> dict[str, str]:
        sites = {ENVIRONMENTS[environment].app_class.name for environment in self.environments}
        return {site_host(site): self._server.address for site in sites}

    def make_task(self, environment: str, seed: int) -> Task:
        goal, difficulty = get_goal(environment, seed), ENVIRONMENTS[environment].difficulty
        return Task(
            id=f"{SOURCE_NAME}/{environment}/{seed}", source=SOURCE_NAME, environment=environment, seed=seed,
            max_steps=self.training_steps(difficulty, None), instruction=goal.instruction, difficulty=difficulty,
            answer=goal.answer,
        )  # fmt: skip

    def start_episode(self, task: Task) -> SiteEpisode:
        """A new copy of the task's site, dropped with the last reference to it. Raises KeyError."""
        site = ENVIRONMENTS[task.environment].app_class.name
        goal = get_goal(task.environment, task.seed)
        episode = SiteEpisode(goal, site, self._delays.start(f"{task.environment}/{task.seed}"))
        with self._lock:
            self._episodes[episode.secret] = episode
        return episode

    async def open(self, page: Page, task: Task) -> str:
        """Start an episode and load its first page; returns the instruction."""
        episode = self.start_episode(task)
        self._open[page.context] = episode
        page.context.on("response", episode.see_response)
        origin = f"http://{site_host(episode.site)}"
        await page.context.add_cookies(
            [{"name": SESSION_COOKIE, "value": episode.secret, "url": origin, "httpOnly": True}]
        )
        await page.goto(origin + episode.goal.start_path, wait_until="load", timeout=0)
        return episode.goal.instruction

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward and end, from the state of the site."""
        return self._open[page.context].result()

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """The next scripted action. Raises ScriptedPolicyError, and KeyError for `premature_submit`."""
        if premature_submit:
            raise KeyError(task.environment)
        try:
            episode = self._open[page.context]
            return await first_action(
                page, episode.next_move(episode.goal.scripted_policy, await read_page_links(page))
            )
        except ScriptedPolicyError as error:
            raise ScriptedPolicyError(f"{task.id}: {error}") from error

    def _respond(self, request: PageRequest) -> PageResponse:
        with self._lock:
            episode = self._episodes.get(request.cookies.get(SESSION_COOKIE, ""))
        if episode is None or request.host != site_host(episode.site):
            return PageResponse(403, b"No episode is under way here.", "text/plain; charset=utf-8")
        return episode.handle_request(request)


def site_host(site: str) -> str:
    return f"{site}.localhost"
