"""Base of task sources whose tasks are web pages, which browser servers open by `Task.url`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.files.rows import is_public, parse_website
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.step_limits import evaluation_limit, training_limit
from megatron_webrl.tasks.web import WebPages
from megatron_webrl.types import Task


class WebPageSource(WebPages, ABC):
    """A TaskSource without pages of its own. Its tasks have the source "web", a url and an instruction."""

    def __init__(self, tasks: TasksConfig) -> None:
        self.settings = tasks

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
        return training_limit(self.settings, difficulty, version)

    def evaluation_steps(self, difficulty: str) -> int:
        """Step limit of an evaluation task; where the settings give none, the last one of training."""
        return evaluation_limit(self.settings, difficulty)

    @property
    def public_website(self) -> str:
        """A website of the tasks that is in the network; empty if none is. Here that of the first training task."""
        url = self.training_task(0, 0).url
        website = parse_website(url)[1] if url else ""
        return website if website and is_public(website) else ""

    @property
    def local_websites(self) -> Iterator[str]:
        """Websites of the tasks that are under .localhost, as far as they are known before a ticket is drawn."""
        yield from ()
