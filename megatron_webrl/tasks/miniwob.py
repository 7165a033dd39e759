"""MiniWoB++ as a task source: its pages are served from the installed package and reset by a seed."""

from __future__ import annotations

from collections.abc import Sequence

from playwright.async_api import Page

from megatron_webrl.config import SamplerConfig
from megatron_webrl.sampling.samplers import fixed
from megatron_webrl.tasks import miniwob_page, oracles
from megatron_webrl.tasks.server import FolderServer
from megatron_webrl.tasks.source import ServedTasks, StepLimits, check_environments
from megatron_webrl.types import Action, Task

NAME = "miniwob"
DIFFICULTY = "easy"
HOST = "miniwob.localhost"
ORIGIN = f"http://{HOST}"


class Miniwob(ServedTasks):
    """Tasks of some environments of MiniWoB++. A context manager; close stops the server."""

    def __init__(
        self,
        environments: Sequence[str],
        max_steps: int,
        *,
        limits: StepLimits | None = None,
        sampler: SamplerConfig | None = None,
    ) -> None:
        """Raises ConfigError for an environment that the package does not have or that is no task."""
        folder = miniwob_page.pages_folder()
        miniwob_page.check_playable(environments)
        check_environments("MiniWoB++ has", environments, miniwob_page.all_environments(folder))
        probabilities = fixed(sampler or SamplerConfig(), environments, [DIFFICULTY] * len(environments))
        super().__init__(environments, max_steps, FolderServer(folder), probabilities, limits or StepLimits())

    @property
    def origins(self) -> frozenset[str]:
        """The pages' own origin: they can reach nothing else."""
        return frozenset({ORIGIN})

    @property
    def addresses(self) -> dict[str, str]:
        """The server behind the origin."""
        return {HOST: self._server.address}

    def make(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""
        return Task(
            id=f"{NAME}/{environment}/{seed}", source=NAME, environment=environment, seed=seed,
            max_steps=self.steps(DIFFICULTY), difficulty=DIFFICULTY,
        )  # fmt: skip

    def renews(self, task: Task) -> bool:
        """Yes, as the package itself does, but for pages that an earlier episode shows through."""
        return miniwob_page.renews(task.environment)

    async def open(self, page: Page, task: Task) -> str:
        """Start the episode, in the environment's page where it is open, or in a new one; returns the instruction."""
        address = ORIGIN + miniwob_page.path(task.environment)
        if page.url != address or not self.renews(task) or not await page.evaluate(miniwob_page.RUNS):
            await page.goto(address, wait_until="load")
        start = miniwob_page.arguments(task.environment, task.seed)
        return str(await page.evaluate(miniwob_page.START, start))

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward, once the page gave one, and whether the page has ended the episode."""
        if not page.url.startswith(ORIGIN + "/"):
            return None, False
        reward, done = await page.evaluate(miniwob_page.RESULT)
        return (None if reward is None else float(reward)), bool(done)

    async def demonstrate(self, page: Page, task: Task, hasty: bool = False) -> Action:
        """What the environment's oracle would do next. Raises OracleError, KeyError without an oracle."""
        return await oracles.next_action(page, task.environment, hasty)
