"""MiniWoB++ episodes for tests: many environments over a few sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.types import Task

SESSIONS = 6
T = TypeVar("T")


def task_of(environment: str, seed: int) -> Task:
    name = f"miniwob/{environment}/{seed}"
    return Task(id=name, source="miniwob", environment=environment, seed=seed, max_steps=20)


@asynccontextmanager
async def pool_of(environments: Iterable[str], width: int, height: int) -> AsyncIterator[BrowserPool]:
    """A pool that enables all actions of the scripted policies."""
    actions = ["drag", "hover", "key", "select_option"]
    settings = BrowserConfig(width=width, height=height, screenshot="png", actions=actions)
    with MiniWobTaskSource(tuple(environments), TasksConfig(max_steps=20)) as source:
        async with BrowserPool(settings, {"miniwob": source}, SESSIONS, 120.0) as fleet:
            yield fleet


async def in_each(
    fleet: BrowserPool, environments: Iterable[str], do: Callable[[Session, str], Awaitable[T]]
) -> dict[str, T]:
    """The result of `do` for each environment, each with its own session."""

    async def one(environment: str) -> T:
        async with fleet.session() as session:
            return await do(session, environment)

    names = tuple(environments)
    return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
