"""Task sources: interface and common base."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.sampler.samplers import draw_environment, environment_probabilities
from megatron_webrl.tasks.sampler.step_limits import evaluation_limit, training_limit
from megatron_webrl.tasks.server import LocalServer
from megatron_webrl.types import Action, Task, TaskSite
from megatron_webrl.util.text import close_matches

if TYPE_CHECKING:
    from playwright.async_api import Page

TRAINING_SEEDS = range(0, 2**30)
HELD_OUT_SEEDS = range(2**30, 2**31)  # page seeds of evaluation; disjoint from the training seeds


class TaskSource(TaskSite, Protocol):
    """Tasks, the site where they are done, and a scripted policy for them."""

    environments: Sequence[str]

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """The next scripted action; `premature_submit`: submit at once if the page has a submit button.

        Raises ScriptedPolicyError if the policy fails, and KeyError without a scripted policy.
        """
        ...

    def close(self) -> None: ...

    @abstractmethod
    def make_task(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; equal on every machine."""
        ...

    @abstractmethod
    def training_task(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> Task:
        """Draw the task of a training ticket. `make_task` of its environment and seed must make it again.

        `knowledge`: what the trainer's sampler knows; None: nothing, as at the start of a run, and a growing step limit
        is at its last value, as for demonstrations.
        """
        ...

    @abstractmethod
    def held_out_task(self, index: int) -> Task:
        """The index-th evaluation task."""
        ...

    def evaluation_tasks(self, episodes: int) -> int:
        """Number of tasks of an evaluation; `episodes` is evaluation.episodes, or what evaluation.skip leaves out."""
        ...


class TaskSourceBase(TaskSource):
    """What sources have in common: environments, step limits and the size of an evaluation, from the settings."""

    def __init__(self, tasks: TasksConfig) -> None:
        self.settings = tasks

    def evaluation_tasks(self, episodes: int) -> int:
        """Number of tasks of an evaluation; `episodes` is evaluation.episodes."""
        return episodes * len(self.environments)

    def training_steps(self, difficulty: str, version: int | None) -> int:
        """Step limit of a training task of a ticket admitted at a policy version; None: the last limit."""
        return training_limit(self.settings, difficulty, version)

    def evaluation_steps(self, difficulty: str) -> int:
        """Step limit of an evaluation task; where the settings give none, the last one of training."""
        return evaluation_limit(self.settings, difficulty)


class LocalTaskSource(TaskSourceBase):
    """Base of sources whose pages a local server serves. A context manager; close stops the server."""

    def __init__(
        self, tasks: TasksConfig, environments: Sequence[str], difficulties: Sequence[str], server: LocalServer
    ) -> None:
        """difficulties: [environments]. Raises ConfigError."""
        super().__init__(tasks)
        self.environments, self._difficulties, self._server = tuple(environments), difficulties, server
        self.probabilities(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.close()

    def training_task(self, seed: int, ticket: int, knowledge: SamplerKnowledge | None = None) -> Task:
        environment = draw_environment(self.probabilities(knowledge), seed, ticket)
        task = self.make_task(self.environments[environment], training_page_seed(seed, ticket))
        version = None if knowledge is None else knowledge.version
        return replace(task, max_steps=self.training_steps(task.difficulty, version))

    def probabilities(self, knowledge: SamplerKnowledge | None) -> tuple[float, ...]:
        """By which a ticket of that knowledge draws environments, [environments]."""
        return environment_probabilities(self.settings.sampler, self.environments, self._difficulties, knowledge)

    def held_out_task(self, index: int) -> Task:
        environment, page_seed = held_out_environment_and_seed(index, len(self.environments))
        task = self.make_task(self.environments[environment], page_seed)
        return replace(task, max_steps=self.evaluation_steps(task.difficulty))


def training_page_seed(seed: int, ticket: int) -> int:
    """The page seed of a ticket; equal on every machine and in every run."""
    digest = hashlib.blake2b(f"{seed}/{ticket}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[8:], "big") % len(TRAINING_SEEDS)


def held_out_environment_and_seed(index: int, environments: int) -> tuple[int, int]:
    """Environment and page seed of the index-th evaluation task; environments take turns."""
    return index % environments, HELD_OUT_SEEDS.start + index // environments % len(HELD_OUT_SEEDS)


def check_environments(owner: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for an empty list of environments, and for an unknown name, with similar known names."""
    if not names:
        raise ConfigError("tasks.environments is empty; name at least one environment")
    for name in names:
        if name not in known:
            hint = close_matches(name, known)
            raise ConfigError(f"tasks.environments: {owner} no {name!r} among its {len(known)} environments{hint}")
