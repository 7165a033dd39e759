"""Where tasks come from and are done, and which one a ticket means."""

from __future__ import annotations

import difflib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from playwright.async_api import Page

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.sampling.samplers import draw_environment
from megatron_webrl.tasks.server import LocalServer
from megatron_webrl.types import Action, Task, TaskSite

TRAINING_SEEDS = range(0, 2**30)
HELD_OUT_SEEDS = range(2**30, 2**31)
"""Page seeds of evaluation; disjoint from those of training."""


class TaskSource(TaskSite, Protocol):
    """Tasks, the site where they are done, and a scripted policy for them."""

    @property
    def environments(self) -> Sequence[str]:
        """Names of the source's environments."""
        ...

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """What a script would do next; `hasty`: submit at once where the page has a button for it.

        Raises OracleError if it is at a loss, KeyError without a script.
        """
        ...

    def close(self) -> None:
        """Give back what the source holds."""
        ...

    def make_task(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""
        ...

    def training_task(self, seed: int, ticket: int, probabilities: Sequence[float] | None = None) -> Task:
        """The task of a training ticket: a pure function of sampler seed, ticket and probabilities.

        probabilities: [environments], of the sampler state that the ticket belongs to; None: those of the settings.
        """
        ...

    def held_out_task(self, index: int) -> Task:
        """The index-th evaluation task."""
        ...


@dataclass(frozen=True)
class StepLimits:
    """Steps of one episode by difficulty, where they differ from the usual number."""

    training: Mapping[str, int] = field(default_factory=dict)
    evaluation: Mapping[str, int] = field(default_factory=dict)  # those left out are as in training

    @classmethod
    def of(cls, tasks: TasksConfig) -> StepLimits:
        """Those of the settings."""
        return cls(tasks.max_steps_by_difficulty, tasks.evaluation_max_steps_by_difficulty)


class LocalTaskSource(ABC):
    """What sources have in common whose pages this machine serves. A context manager; close stops the server."""

    def __init__(
        self,
        environments: Sequence[str],
        max_steps: int,
        server: LocalServer,
        probabilities: Sequence[float],
        limits: StepLimits,
    ) -> None:
        """`probabilities`: [environments], by which tickets draw unless they have a sampler state."""
        self.environments, self.max_steps, self.limits = tuple(environments), max_steps, limits
        self._server, self._probabilities = server, probabilities

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving pages."""
        self._server.close()

    def can_reuse_page(self, task: Task) -> bool:
        """No: every episode wants a browser context of its own."""
        return False

    @abstractmethod
    def make_task(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""

    def training_max_steps(self, difficulty: str) -> int:
        """Steps of a training episode."""
        return self.limits.training.get(difficulty, self.max_steps)

    def training_task(self, seed: int, ticket: int, probabilities: Sequence[float] | None = None) -> Task:
        """The task of a training ticket: see TaskSource."""
        environment = draw_environment(self._probabilities if probabilities is None else probabilities, seed, ticket)
        return self.make_task(self.environments[environment], training_page_seed(seed, ticket))

    def held_out_task(self, index: int) -> Task:
        """The index-th evaluation task; environments take turns, and no page seed is ever trained on."""
        environment, page_seed = held_out_environment_and_seed(index, len(self.environments))
        task = self.make_task(self.environments[environment], page_seed)
        return replace(task, max_steps=self.limits.evaluation.get(task.difficulty, task.max_steps))


def training_page_seed(seed: int, ticket: int) -> int:
    """The page seed of a ticket; the same on every machine and in every run."""
    digest = hashlib.blake2b(f"{seed}/{ticket}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[8:], "big") % len(TRAINING_SEEDS)


def held_out_environment_and_seed(index: int, environments: int) -> tuple[int, int]:
    """Environment and page seed of the index-th evaluation task; environments take turns."""
    return index % environments, HELD_OUT_SEEDS.start + index // environments % len(HELD_OUT_SEEDS)


def check_names(key: str, owner: str, kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for a name of the setting `key` that is not known, with the nearest ones."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=4, cutoff=0.4)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise ConfigError(f"{key}: {owner} no {name!r} among its {len(known)} {kind}{hint}")


def check_environments(owner: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for an empty list of environments or a name that is not known, with the nearest ones."""
    if not names:
        raise ConfigError("tasks.environments is empty; name at least one environment")
    check_names("tasks.environments", owner, "environments", names, known)
