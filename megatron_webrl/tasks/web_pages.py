"""Base of task sources whose tasks are web pages, which browser servers open by `Task.url`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.files.rows import is_public, parse_website
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.step_limits import training_limit
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Task

if TYPE_CHECKING:
    from playwright.async_api import Page


class WebPageSource(ABC):
    """A TaskSource without pages of its own. Its tasks have the source "web", a url and an instruction."""

    environments: Sequence[str]

    def __init__(self, tasks: TasksConfig) -> None:
        self.settings = tasks
        self._web = OpenWeb(tasks.max_steps)

    @abstractmethod
    def make_task(self, environment: str, seed: int) -> Task:
        """The task of an environment and a seed; equal on every machine."""

    @abstractmethod
    def training_task(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> Task:
        """Draw the task of a training ticket; `make_task` makes it again."""

    @abstractmethod
    def held_out_task(self, index: int) -> Task:
        """The index-th evaluation task."""

    def evaluation_tasks(self, episodes: int) -> int:
        """Number of tasks of an evaluation; `episodes` is evaluation.episodes."""
        return episodes * len(self.environments)

    def training_steps(self, difficulty: str, version: int | None) -> int:
        """Step limit of a training task of a ticket admitted at a policy version; None: the last limit."""
        tasks = self.settings
        return training_limit(tasks.max_steps, tasks.max_steps_by_difficulty, tasks.growing_steps, difficulty, version)

    def evaluation_steps(self, difficulty: str) -> int:
        """Step limit of an evaluation task; where the settings give none, the last one of training."""
        last = self.training_steps(difficulty, None)
        return self.settings.evaluation_max_steps_by_difficulty.get(difficulty, last)

    @property
    def public_website(self) -> str:
        """A website of the tasks that is in the network; empty if none is. Here that of the first training task."""
        url = self.training_task(0, 0).url
        website = parse_website(url).website if url else ""
        return website if website and is_public(website) else ""

    @property
    def local_websites(self) -> Iterator[str]:
        """Websites of the tasks that are under .localhost, as far as they are known before a ticket is drawn."""
        yield from ()

    @property
    def origins(self) -> frozenset[str]:
        """No origins besides public addresses."""
        return self._web.origins

    @property
    def addresses(self) -> Mapping[str, str]:
        return self._web.addresses

    def can_reuse_page(self, task: Task) -> bool:
        return self._web.can_reuse_page(task)

    async def open(self, page: Page, task: Task) -> str:
        return await self._web.open(page, task)

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return await self._web.result(page, task)

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """Raises KeyError without a scripted policy for the page."""
        return await self._web.demonstrate(page, task, premature_submit)

    def close(self) -> None:
        """Release what the source holds."""
        self._web.close()
