"""The sites as a task source: one server for all of them, and a state of its own for every episode."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from playwright.async_api import BrowserContext, Page

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import LatencyConfig, SamplerConfig
from megatron_webrl.sampling.samplers import initial_probabilities
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.tasks.sites.catalog import ENVIRONMENTS, SITE_APPS, get_goal
from megatron_webrl.tasks.sites.goal import SITE_ERROR_RESULT, Goal, reward_and_done
from megatron_webrl.tasks.sites.high_level_actions import HighLevelAction, PageLinks, first_action, read_page_links
from megatron_webrl.tasks.sites.latency import response_delay
from megatron_webrl.tasks.source import LocalTaskSource, StepLimits, check_environments, check_names
from megatron_webrl.types import Action, Task

SOURCE_NAME = "sites"
SESSION_COOKIE = "session"
MAX_COUNTED_TASKS = 1024


class SiteEpisode:
    """One episode's copy of a site, behind a secret that only its browser context sends."""

    def __init__(self, goal: Goal, site: str, number: str, latency: LatencyConfig) -> None:
        """`number` names the episode; its delays depend on it."""
        self.goal, self.site = goal, site
        self.secret = secrets.token_urlsafe(18)
        self._app = goal.make_app()
        self._number, self._latency = number, latency
        self._requests = 0
        self._failed = False
        self._lock = threading.Lock()

    def handle_request(self, request: PageRequest) -> PageResponse:
        """The site's answer. Thread-safe."""
        with self._lock:
            wait = response_delay(self._latency, self.site, self._number, self._requests)
            self._requests += 1
            self._failed = True  # unless the site has an answer
            reply = self._app.handle_request(request)
            self._failed = False
        return PageResponse(reply.status, reply.body, reply.content_type, reply.headers, wait)

    def result(self) -> tuple[float | None, bool]:
        """Reward and end by what has been done so far."""
        with self._lock:
            return SITE_ERROR_RESULT if self._failed else reward_and_done(self.goal, self._app.effects)

    def next_scripted_action(self, look: PageLinks) -> HighLevelAction:
        """What the script would do on a page. Raises OracleError."""
        with self._lock:
            return self.goal.scripted_policy(self._app, look)


class SiteTaskSource(LocalTaskSource):
    """Tasks of some environments of the sites. A context manager; close stops the server."""

    def __init__(
        self,
        environments: Sequence[str],
        max_steps: int,
        latency: LatencyConfig | None = None,
        *,
        limits: StepLimits | None = None,
        sampler: SamplerConfig | None = None,
    ) -> None:
        """Raises ConfigError for an environment or a site that does not exist."""
        check_environments("the sites have", environments, list(ENVIRONMENTS))
        difficulties = [ENVIRONMENTS[name].difficulty for name in environments]
        probabilities = initial_probabilities(sampler or SamplerConfig(), environments, difficulties)
        server = LocalServer(self._respond, "sites-server")
        super().__init__(environments, max_steps, server, probabilities, limits or StepLimits())
        self._latency = latency or LatencyConfig()
        _check_latency(self._latency)
        self._lock = threading.Lock()
        # An episode lives as long as its browser context, or whoever else began it.
        self._episodes: weakref.WeakValueDictionary[str, SiteEpisode] = weakref.WeakValueDictionary()
        self._open: weakref.WeakKeyDictionary[BrowserContext, SiteEpisode] = weakref.WeakKeyDictionary()
        self._begun: OrderedDict[str, int] = OrderedDict()  # episodes so far by task

    @property
    def origins(self) -> frozenset[str]:
        """The sites of the environments: pages can reach nothing else."""
        return frozenset(f"http://{host}" for host in self.addresses)

    @property
    def addresses(self) -> dict[str, str]:
        """The one server behind all of them."""
        sites = {ENVIRONMENTS[environment].app_class.name for environment in self.environments}
        return {site_host(site): self._server.address for site in sites}

    def make_task(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""
        wanted, difficulty = get_goal(environment, seed), ENVIRONMENTS[environment].difficulty
        return Task(
            id=f"{SOURCE_NAME}/{environment}/{seed}", source=SOURCE_NAME, environment=environment, seed=seed,
            max_steps=self.training_max_steps(difficulty), instruction=wanted.instruction, difficulty=difficulty,
            answer=wanted.answer,
        )  # fmt: skip

    def start_episode(self, task: Task) -> SiteEpisode:
        """A fresh copy of the task's site; forgotten with the last reference to it. Raises KeyError."""
        number = self._begun.pop(task.id, 0)
        self._begun[task.id] = number + 1
        if len(self._begun) > MAX_COUNTED_TASKS:
            self._begun.popitem(last=False)
        site = ENVIRONMENTS[task.environment].app_class.name
        wanted = get_goal(task.environment, task.seed)
        episode = SiteEpisode(wanted, site, f"{task.environment}/{task.seed}/{number}", self._latency)
        with self._lock:
            self._episodes[episode.secret] = episode
        return episode

    async def open(self, page: Page, task: Task) -> str:
        """Begin an episode and load its first page; returns the instruction."""
        episode = self.start_episode(task)
        self._open[page.context] = episode
        origin = f"http://{site_host(episode.site)}"
        await page.context.add_cookies(
            [{"name": SESSION_COOKIE, "value": episode.secret, "url": origin, "httpOnly": True}]
        )
        await page.goto(origin + episode.goal.start_path, wait_until="load")
        return episode.goal.instruction

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward and end by the state of the site, wherever the page is."""
        return self._open[page.context].result()

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """What the task's script would do next. Raises OracleError, KeyError for a hasty one: there is none."""
        if premature_submit:
            raise KeyError(task.environment)
        try:
            return await first_action(page, self._open[page.context].next_scripted_action(await read_page_links(page)))
        except ScriptedPolicyError as error:
            raise ScriptedPolicyError(f"{task.id}: {error}") from error

    def _respond(self, request: PageRequest) -> PageResponse:
        with self._lock:
            episode = self._episodes.get(request.cookies.get(SESSION_COOKIE, ""))
        if episode is None or request.host != site_host(episode.site):
            return PageResponse(403, b"No episode is under way here.", "text/plain; charset=utf-8")
        return episode.handle_request(request)


def site_host(site: str) -> str:
    """The name under which browsers reach a site."""
    return f"{site}.localhost"


def _check_latency(latency: LatencyConfig) -> None:
    check_names(
        "tasks.latency.site_median_seconds",
        "this machine serves",
        "sites",
        list(latency.site_median_seconds),
        list(SITE_APPS),
    )
    for site, median in latency.site_median_seconds.items():
        if not 0 <= median < float("inf"):
            raise ConfigError(f"tasks.latency.site_median_seconds.{site}={median} must be at least 0 seconds")
