"""The sites as a task source: one server for all of them, and a state of its own for every episode."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from playwright.async_api import BrowserContext, Page

from megatron_webrl.config import ConfigError, LatencyConfig, SamplerConfig
from megatron_webrl.sampling.samplers import fixed
from megatron_webrl.tasks.aim import OracleError
from megatron_webrl.tasks.server import LocalServer, Reply, Request
from megatron_webrl.tasks.sites.catalog import ENVIRONMENTS, SITES, goal
from megatron_webrl.tasks.sites.goal import FAILED, Goal, verdict
from megatron_webrl.tasks.sites.latency import delay
from megatron_webrl.tasks.sites.moves import Look, Move, look_at, next_action
from megatron_webrl.tasks.source import ServedTasks, StepLimits, check_environments, check_names
from megatron_webrl.types import Action, Task

NAME = "sites"
COOKIE = "session"
REMEMBERED_TASKS = 1024


class Episode:
    """One episode's copy of a site, behind a secret that only its browser context sends."""

    def __init__(self, goal: Goal, site: str, number: str, latency: LatencyConfig) -> None:
        """`number` names the episode; its delays depend on it."""
        self.goal, self.site = goal, site
        self.secret = secrets.token_urlsafe(18)
        self._app = goal.app()
        self._number, self._latency = number, latency
        self._requests = 0
        self._failed = False
        self._lock = threading.Lock()

    def respond(self, request: Request) -> Reply:
        """The site's answer. Thread-safe."""
        with self._lock:
            wait = delay(self._latency, self.site, self._number, self._requests)
            self._requests += 1
            self._failed = True  # unless the site has an answer
            reply = self._app.respond(request)
            self._failed = False
        return Reply(reply.status, reply.body, reply.content_type, reply.headers, wait)

    def result(self) -> tuple[float | None, bool]:
        """Reward and end by what has been done so far."""
        with self._lock:
            return FAILED if self._failed else verdict(self.goal, self._app.effects)

    def next_move(self, look: Look) -> Move:
        """What the script would do on a page. Raises OracleError."""
        with self._lock:
            return self.goal.script(self._app, look)


class Sites(ServedTasks):
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
        probabilities = fixed(sampler or SamplerConfig(), environments, difficulties)
        server = LocalServer(self._respond, "sites-server")
        super().__init__(environments, max_steps, server, probabilities, limits or StepLimits())
        self._latency = latency or LatencyConfig()
        _check_latency(self._latency)
        self._lock = threading.Lock()
        # An episode lives as long as its browser context, or whoever else began it.
        self._episodes: weakref.WeakValueDictionary[str, Episode] = weakref.WeakValueDictionary()
        self._open: weakref.WeakKeyDictionary[BrowserContext, Episode] = weakref.WeakKeyDictionary()
        self._begun: OrderedDict[str, int] = OrderedDict()  # episodes so far by task

    @property
    def origins(self) -> frozenset[str]:
        """The sites of the environments: pages can reach nothing else."""
        return frozenset(f"http://{host}" for host in self.addresses)

    @property
    def addresses(self) -> dict[str, str]:
        """The one server behind all of them."""
        sites = {ENVIRONMENTS[environment].site.name for environment in self.environments}
        return {host_of(site): self._server.address for site in sites}

    def make(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""
        wanted, difficulty = goal(environment, seed), ENVIRONMENTS[environment].difficulty
        return Task(
            id=f"{NAME}/{environment}/{seed}", source=NAME, environment=environment, seed=seed,
            max_steps=self.steps(difficulty), instruction=wanted.instruction, difficulty=difficulty,
            answer=wanted.answer,
        )  # fmt: skip

    def begin(self, task: Task) -> Episode:
        """A fresh copy of the task's site; forgotten with the last reference to it. Raises KeyError."""
        number = self._begun.pop(task.id, 0)
        self._begun[task.id] = number + 1
        if len(self._begun) > REMEMBERED_TASKS:
            self._begun.popitem(last=False)
        site = ENVIRONMENTS[task.environment].site.name
        wanted = goal(task.environment, task.seed)
        episode = Episode(wanted, site, f"{task.environment}/{task.seed}/{number}", self._latency)
        with self._lock:
            self._episodes[episode.secret] = episode
        return episode

    async def open(self, page: Page, task: Task) -> str:
        """Begin an episode and load its first page; returns the instruction."""
        episode = self.begin(task)
        self._open[page.context] = episode
        origin = f"http://{host_of(episode.site)}"
        await page.context.add_cookies([{"name": COOKIE, "value": episode.secret, "url": origin, "httpOnly": True}])
        await page.goto(origin + episode.goal.start, wait_until="load")
        return episode.goal.instruction

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward and end by the state of the site, wherever the page is."""
        return self._open[page.context].result()

    async def demonstrate(self, page: Page, task: Task, hasty: bool = False) -> Action:
        """What the task's script would do next. Raises OracleError, KeyError for a hasty one: there is none."""
        if hasty:
            raise KeyError(task.environment)
        try:
            return await next_action(page, self._open[page.context].next_move(await look_at(page)))
        except OracleError as error:
            raise OracleError(f"{task.id}: {error}") from error

    def _respond(self, request: Request) -> Reply:
        with self._lock:
            episode = self._episodes.get(request.cookies.get(COOKIE, ""))
        if episode is None or request.host != host_of(episode.site):
            return Reply(403, b"No episode is under way here.", "text/plain; charset=utf-8")
        return episode.respond(request)


def host_of(site: str) -> str:
    """The name under which browsers reach a site."""
    return f"{site}.localhost"


def _check_latency(latency: LatencyConfig) -> None:
    check_names("tasks.latency.medians", "this machine serves", "sites", list(latency.medians), list(SITES))
    for site, median in latency.medians.items():
        if not 0 <= median < float("inf"):
            raise ConfigError(f"tasks.latency.medians.{site}={median} must be at least 0 seconds")
