"""The browser session of one lease: at most one episode at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError, BrowserTimeout
from megatron_webrl.browser.server.protocol import SessionState
from megatron_webrl.browser.session import Session
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Observation, Task


class NoEpisode(Exception):
    """There was no reset yet, or the browser has failed; the message is one sentence."""


class LeaseSession:
    """Life cycle: reset -> step, step, ... -> reset -> ... -> end_episode. The caller runs one operation at a time."""

    def __init__(self, pool: BrowserPool, step_seconds: float) -> None:
        self.state: SessionState = "idle"
        self.task: Task | None = None
        self.observation: Observation | None = None
        self.steps = 0
        self.outcome: str | None = None  # name of the browser failure
        self._pool, self._step_seconds = pool, step_seconds
        self._session: Session | None = None
        self._open = AsyncExitStack()

    @property
    def refused_requests(self) -> dict[str, int]:
        """Number of page requests of this episode that the egress policy refused, by reason."""
        return {} if self._session is None else dict(self._session.network.refused)

    async def reset(self, task: Task) -> Observation:
        """End the previous episode and begin one in a fresh browser context. Raises BrowserError."""
        await self.end_episode()
        self.task, self.state = task, "resetting"
        try:
            self._session, observation = await self._open.enter_async_context(self._pool.episode(task))
        except BaseException as error:
            await self._fail(error)
            raise
        self.state, self.observation = "waiting", observation
        return observation

    async def step(self, action: Action) -> Observation:
        """Execute an action. Raises BrowserError, which ends the episode; ValueError, NoEpisode."""
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
        """The scripted policy's next action. Raises BrowserError, NoEpisode, ScriptedPolicyError; KeyError if none."""
        session, task = self._running(), self.task
        assert task is not None
        try:
            async with asyncio.timeout(self._step_seconds):
                return await site.demonstrate(session.page, task, premature_submit)
        except TimeoutError:
            limit = f"{self._step_seconds} s (rollout.operation_timeout_seconds)"
            raise BrowserTimeout(f"the scripted policy did not read the page within {limit}") from None
        except PlaywrightError as error:
            raise BrowserError(
                f"the scripted policy could not read the page: {error.message.splitlines()[0]}"
            ) from error

    async def end_episode(self) -> None:
        """Return the browser context to the pool and reset the state. A second call does nothing."""
        self._session, self.task, self.observation, self.outcome = None, None, None, None
        self.state, self.steps = "idle", 0
        await self._open.aclose()

    def _running(self) -> Session:
        if self._session is None:
            ended = f"the episode ended with {self.outcome}" if self.outcome else "there is no episode"
            raise NoEpisode(f"{ended}; reset begins one")
        return self._session

    async def _fail(self, error: BaseException) -> None:
        """Return the browser context to the pool, but keep task and observation for state queries."""
        self._session = None
        self.outcome = error.outcome if isinstance(error, BrowserError) else "cancelled"
        self.state = "crashed"
        await self._open.aclose()
