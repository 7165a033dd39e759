"""MiniWoB++ as a task source: pages of the installed package, reset by a seed."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence

from playwright.async_api import BrowserContext, Page

from megatron_webrl.config.tasks import LatencyConfig, SamplerConfig
from megatron_webrl.tasks import miniwob_page, scripted_policies
from megatron_webrl.tasks.latency import EpisodeDelays, ResponseDelays
from megatron_webrl.tasks.server import FolderServer
from megatron_webrl.tasks.source import LocalTaskSource, StepLimits, check_environments
from megatron_webrl.types import Action, Task

SOURCE_NAME = "miniwob"
DIFFICULTY = "easy"
HOST = "miniwob.localhost"
ORIGIN = f"http://{HOST}"


class MiniWobTaskSource(LocalTaskSource):
    """Tasks of a list of MiniWoB++ environments. A context manager; close stops the server."""

    def __init__(
        self,
        environments: Sequence[str],
        max_steps: int,
        latency: LatencyConfig | None = None,
        *,
        limits: StepLimits | None = None,
        sampler: SamplerConfig | None = None,
    ) -> None:
        """Raises ConfigError for an unknown or unsupported environment."""
        folder = miniwob_page.pages_folder()
        miniwob_page.check_supported(environments)
        check_environments("MiniWoB++ has", environments, miniwob_page.all_environments(folder))
        difficulties = [DIFFICULTY] * len(environments)
        super().__init__(environments, max_steps, FolderServer(folder), difficulties, limits or StepLimits(), sampler)
        self._delays = EpisodeDelays(latency or LatencyConfig())
        self._open: weakref.WeakKeyDictionary[BrowserContext, ResponseDelays] = weakref.WeakKeyDictionary()

    @property
    def origins(self) -> frozenset[str]:
        """The origin of the pages: they can reach nothing else."""
        return frozenset({ORIGIN})

    @property
    def addresses(self) -> dict[str, str]:
        return {HOST: self._server.address}

    def make_task(self, environment: str, seed: int) -> Task:
        return Task(
            id=f"{SOURCE_NAME}/{environment}/{seed}", source=SOURCE_NAME, environment=environment, seed=seed,
            max_steps=self.training_max_steps(DIFFICULTY), difficulty=DIFFICULTY,
        )  # fmt: skip

    def can_reuse_page(self, task: Task) -> bool:
        """True, except for pages that keep state of an earlier episode."""
        return miniwob_page.can_reuse_page(task.environment)

    async def open(self, page: Page, task: Task) -> str:
        """Start the episode, on the environment's page if it is open already; returns the instruction."""
        self._open[page.context] = self._delays.start(f"{task.environment}/{task.seed}")
        address = ORIGIN + miniwob_page.page_path(task.environment)
        if (
            page.url != address
            or not self.can_reuse_page(task)
            or not await page.evaluate(miniwob_page.IS_STARTED_SCRIPT)
        ):
            await page.goto(address, wait_until="load", timeout=0)
        start = miniwob_page.start_arguments(task.environment, task.seed)
        return str(await page.evaluate(miniwob_page.START_SCRIPT, start))

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """The page's reward, None while there is none, and whether the page has ended the episode.

        Pages answer without a request, so that the simulated response time of an action passes here.
        """
        await asyncio.sleep(self._open[page.context].next())
        if not page.url.startswith(ORIGIN + "/"):
            return None, False
        reward, done = await page.evaluate(miniwob_page.RESULT_SCRIPT)
        return (None if reward is None else float(reward)), bool(done)

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """The next scripted action. Raises ScriptedPolicyError, and KeyError without a scripted policy."""
        return await scripted_policies.next_scripted_action(page, task.environment, premature_submit)
