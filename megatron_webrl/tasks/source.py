"""Where tasks come from and are done, and which one a ticket means."""

from __future__ import annotations

import difflib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from playwright.async_api import Page

from megatron_webrl.config import ConfigError
from megatron_webrl.tasks.server import LocalServer
from megatron_webrl.types import Action, Task

TRAINING_SEEDS = range(0, 2**30)
HELD_OUT_SEEDS = range(2**30, 2**31)
"""Page seeds of evaluation; disjoint from those of training."""


class TaskSite(Protocol):
    """Where tasks are done: what a browser session needs, and what a script can do there."""

    @property
    def environments(self) -> Sequence[str]:
        """What kinds of tasks are done here."""
        ...

    @property
    def origins(self) -> frozenset[str]:
        """All that pages may reach."""
        ...

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where host names of the source's pages lead to."""
        ...

    async def open(self, page: Page, task: Task) -> str:
        """Bring the page to the start of the task; returns the instruction."""
        ...

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward (None while there is none) and whether the task is over."""
        ...

    async def demonstrate(self, page: Page, task: Task) -> Action:
        """What a script would do next. Raises OracleError if it is at a loss, KeyError without a script."""
        ...

    def close(self) -> None:
        """Give back what the source holds."""
        ...


class TaskSource(TaskSite, Protocol):
    """Tasks, and the site where they are done."""

    def make(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""
        ...

    def task(self, seed: int, ticket: int) -> Task:
        """The task of a training ticket: a pure function of sampler seed and ticket."""
        ...

    def held_out(self, index: int) -> Task:
        """The index-th evaluation task."""
        ...


class ServedTasks(ABC):
    """What sources have in common whose pages this machine serves. A context manager; close stops the server."""

    def __init__(self, environments: Sequence[str], max_steps: int, server: LocalServer) -> None:
        self.environments, self.max_steps = tuple(environments), max_steps
        self._server = server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving pages."""
        self._server.close()

    @abstractmethod
    def make(self, environment: str, seed: int) -> Task:
        """The task of an environment and a page seed; the same on every machine."""

    def task(self, seed: int, ticket: int) -> Task:
        """The task of a training ticket: a pure function of sampler seed and ticket."""
        environment, page_seed = draw(seed, ticket, len(self.environments))
        return self.make(self.environments[environment], page_seed)

    def held_out(self, index: int) -> Task:
        """The index-th evaluation task; environments take turns, and no page seed is ever trained on."""
        environment, page_seed = evaluation(index, len(self.environments))
        return self.make(self.environments[environment], page_seed)


def draw(seed: int, ticket: int, environments: int) -> tuple[int, int]:
    """Index of an environment, uniform, and a training page seed; the same on every machine and in every run."""
    digest = hashlib.blake2b(f"{seed}/{ticket}".encode(), digest_size=16).digest()
    environment = int.from_bytes(digest[:8], "big") % environments
    return environment, int.from_bytes(digest[8:], "big") % len(TRAINING_SEEDS)


def evaluation(index: int, environments: int) -> tuple[int, int]:
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
