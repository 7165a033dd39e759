"""Where tasks come from, and which one a ticket means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

from playwright.async_api import Page

from megatron_webrl.types import Task

TRAINING_SEEDS = range(0, 2**30)
HELD_OUT_SEEDS = range(2**30, 2**31)
"""Page seeds of evaluation; disjoint from those of training."""


class TaskSource(Protocol):
    """Tasks, and the site where they are done (what a browser session needs of it)."""

    @property
    def origins(self) -> frozenset[str]:
        """All that pages may reach."""
        ...

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where host names of the source's pages lead to."""
        ...

    def task(self, seed: int, ticket: int) -> Task:
        """The task of a training ticket: a pure function of sampler seed and ticket."""
        ...

    def held_out(self, index: int) -> Task:
        """The index-th evaluation task."""
        ...

    async def open(self, page: Page, task: Task) -> str:
        """Bring the page to the start of the task; returns the instruction."""
        ...

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward (None while there is none) and whether the task is over."""
        ...

    def close(self) -> None:
        """Give back what the source holds."""
        ...


def draw(seed: int, ticket: int, environments: int) -> tuple[int, int]:
    """Index of an environment, uniform, and a training page seed; the same on every machine and in every run."""
    digest = hashlib.blake2b(f"{seed}/{ticket}".encode(), digest_size=16).digest()
    environment = int.from_bytes(digest[:8], "big") % environments
    return environment, int.from_bytes(digest[8:], "big") % len(TRAINING_SEEDS)
