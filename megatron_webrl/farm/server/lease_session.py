"""One lease's use of the browsers: at most one episode at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError, BrowserTimeout
from megatron_webrl.browser.session import Session
from megatron_webrl.farm.protocol import SessionState
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Observation, Task


class NoEpisode(Exception):
    """A step before a reset, or after the browser's failure; the message is one sentence."""


class LeaseSession:
    """Life: reset -> step, step, ... -> reset -> ... -> end. Its user sees to it that one operation runs at a time."""

    def __init__(self, pool: BrowserPool, step_seconds: float) -> None:
        self.state: SessionState = "idle"
        self.task: Task | None = None
        self.observation: Observation | None = None
        self.steps = 0
        self.outcome: str | None = None  # how the browser failed
        self._fleet, self._step_seconds = pool, step_seconds
        self._session: Session | None = None
        self._open = AsyncExitStack()

    @property
    def refused_requests(self) -> dict[str, int]:
        """Requests of this episode that policy refused, by reason."""
        return {} if self._session is None else dict(self._session.network.refused)

    async def reset(self, task: Task) -> Observation:
        """End the episode before, and begin one in a fresh browser context. Raises BrowserError."""
        await self.end_episode()
        self.task, self.state = task, "resetting"
        try:
            self._session, seen = await self._open.enter_async_context(self._fleet.episode(task))
        except BaseException as error:
            await self._fail(error)
            raise
        self.state, self.observation = "waiting", seen
        return seen

    async def step(self, action: Action) -> Observation:
        """Act. Raises BrowserError, after which the episode is over; ValueError, NoEpisode."""
        session, self.state = self._running(), "acting"
        try:
            self.observation = await session.step(action)
        except ValueError:
            self.state = "waiting"
            raise
        except BaseException as error:
            await self._fail(error)
            raise
        self.state = "waiting"
        self.steps += 1
        return self.observation

    async def demonstration(self, site: TaskSource | OpenWeb, premature_submit: bool) -> Action:
        """What a script would do next. Raises BrowserError, NoEpisode, OracleError, KeyError without a script."""
        session, task = self._running(), self.task
        assert task is not None
        try:
            async with asyncio.timeout(self._step_seconds):
                return await site.demonstrate(session.page, task, premature_submit)
        except TimeoutError:
            limit = f"{self._step_seconds} s (rollout.operation_timeout_seconds)"
            raise BrowserTimeout(f"the script did not look at the page within {limit}") from None
        except PlaywrightError as error:
            raise BrowserError(f"the script could not look at the page: {error.message.splitlines()[0]}") from error

    async def end_episode(self) -> None:
        """Give the browser context back and forget the episode. A second call does nothing."""
        self._session, self.task, self.observation, self.outcome = None, None, None, None
        self.state, self.steps = "idle", 0
        await self._open.aclose()

    def _running(self) -> Session:
        if self._session is None:
            ended = f"the episode has ended with {self.outcome}" if self.outcome else "there is no episode"
            raise NoEpisode(f"{ended}; reset begins one")
        return self._session

    async def _fail(self, error: BaseException) -> None:
        """Give the context back, whatever has happened to it; what is known of the episode stays for whoever asks."""
        self._session = None
        self.outcome = error.outcome if isinstance(error, BrowserError) else "cancelled"
        self.state = "crashed"
        await self._open.aclose()
