"""MiniWoB++ pages half of whose episodes cannot succeed, which the agent can see: the query has a red background.

Everything else is as on the other pages: Submit ends the episode, and the agent chooses when. In training every second
episode of a task is such, so that half of each group is; of held-out tasks every second one is, in each episode.
"""

from __future__ import annotations

import random
from dataclasses import replace

from playwright.async_api import Page

from megatron_webrl.config.tasks import PageTasksConfig
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.tasks.source import HELD_OUT_SEEDS
from megatron_webrl.types import Action, Task

SOURCE = "tools.bench.stuck_pages:StuckPages"
SUBMIT_PROBABILITY = 0.1  # of a step of the script on a stuck page; else it waits
WAIT = Action("wait", time=0.1)  # seconds
MARK_SCRIPT = "(stuck) => { document.getElementById('query').style.background = stuck ? '#f00' : ''; }"


class StuckPages(MiniWobTaskSource):
    """The configured environments of MiniWoB++. A context manager; close stops the server."""

    def __init__(self, tasks: PageTasksConfig) -> None:
        """Raises ConfigError as its base."""
        super().__init__(tasks.environments, tasks)
        self._random = random.Random(0)

    def make_task(self, environment: str, seed: int) -> Task:
        return replace(super().make_task(environment, seed), source=SOURCE)

    async def open(self, page: Page, task: Task) -> str:
        """Start the episode; returns the instruction."""
        instruction = await super().open(page, task)
        await page.evaluate(MARK_SCRIPT, self._is_stuck(page, task))
        return instruction

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """As its base; a stuck page has the reward of a failure."""
        reward, done = await super().result(page, task)
        return (-1.0 if reward is not None and self._is_stuck(page, task) else reward), done

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """The next scripted action; on a stuck page Submit or a wait. Raises ScriptedPolicyError."""
        if not self._is_stuck(page, task):
            return await super().demonstrate(page, task, premature_submit)
        if premature_submit or self._random.random() < SUBMIT_PROBABILITY:
            return await super().demonstrate(page, task, premature_submit=True)
        return WAIT

    def _is_stuck(self, page: Page, task: Task) -> bool:
        number = 0 if task.seed in HELD_OUT_SEEDS else int(self._open[page.context].episode.rpartition("/")[2])
        return (task.seed + number) % 2 == 1
