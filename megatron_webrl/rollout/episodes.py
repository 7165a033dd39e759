"""Tickets become episodes: the task that a ticket means, a browser session, the agent."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config import Config
from megatron_webrl.farm.client import Browsers
from megatron_webrl.model.processing import Processor
from megatron_webrl.rollout.agent import run_episode
from megatron_webrl.rollout.browsers import open_browsers
from megatron_webrl.rollout.generation import Responder
from megatron_webrl.rollout.limit import Limit
from megatron_webrl.rollout.pace import FreeRunning, Lockstep, Pacing
from megatron_webrl.rollout.toolset import Toolset
from megatron_webrl.sampling.states import PublishedStates
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.types import Task, Trajectory

log = logging.getLogger(__name__)


@dataclass
class Episodes:
    """What every episode of a worker shares: task source, browsers, processor, pace."""

    config: Config
    source: TaskSource
    browsers: Browsers
    processor: Processor
    pacing: Pacing
    states: PublishedStates | None = None  # None: the settings alone say which task a ticket means

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: Config, processor: Processor, name: str, states: PublishedStates | None = None
    ) -> AsyncIterator[Episodes]:
        """Open the task source and the browsers of the worker `name`; both end with the context."""
        source = make_source(config.tasks)
        sessions = config.rollout.groups_in_flight * config.rollout.group_size
        sessions += config.evaluation.slots if config.evaluation.every else 0
        try:
            async with open_browsers(config, sessions, name) as browsers:
                rollout = config.rollout
                lockstep = rollout.stepping == "lockstep"
                pacing: Pacing = Lockstep(rollout.step_seconds) if lockstep else FreeRunning()
                yield cls(config, source, browsers, processor, pacing, states)
        finally:
            source.close()

    async def run(
        self, responder: Responder, ticket: int, index: int, incarnation: int, limit: Limit | None = None
    ) -> Trajectory:
        """One try at an episode of a ticket's group. Without a browser it is masked, not raised.

        `limit` may end it before its time. Raises JobFailed if the ticket's sampler state does not come, Stopped if the
        job ends meanwhile.
        """
        probabilities = None if self.states is None else await self.states.probabilities(ticket)
        task, started = self.source.task(self.config.run.seed, ticket, probabilities), time.monotonic()
        limit = limit or Limit(self.config.rollout.episode_seconds)
        scope = None
        try:
            async with AsyncExitStack() as stack:
                async with limit.scope(None) as scope:  # who gives sessions has a limit of its own
                    session = await stack.enter_async_context(self.browsers.session())
                pace = stack.enter_context(self.pacing.episode())
                return await run_episode(
                    responder, session, self.processor, task, self.config.rollout,
                    ticket=ticket, index=index, group_size=self.config.rollout.group_size, incarnation=incarnation,
                    toolset=Toolset.of(self.config.browser), limit=limit, pace=pace,
                )  # fmt: skip
        except BrowserError as error:
            log.warning("episode %d of ticket %d has no browser: %s", index, ticket, error)
            outcome = error.outcome
        except TimeoutError:
            if scope is None or not scope.expired():
                raise
            outcome = limit.outcome
        return self._without_session(task, ticket, index, incarnation, outcome, time.monotonic() - started)

    def _without_session(
        self, task: Task, ticket: int, index: int, incarnation: int, outcome: str, seconds: float
    ) -> Trajectory:
        return Trajectory(
            ticket=ticket,
            index=index,
            group_size=self.config.rollout.group_size,
            incarnation=incarnation,
            task=task,
            instruction=task.instruction or "",
            steps=(),
            images=(),
            reward=0.0,
            outcome=outcome,
            temperature=self.config.rollout.temperature,
            seconds=seconds,
            finished_at=time.time(),
        )
