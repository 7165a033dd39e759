"""Tickets become episodes: the task that a ticket means, a browser session, the agent."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config import Config
from megatron_webrl.farm.client import Browsers
from megatron_webrl.model.processing import Processor
from megatron_webrl.rollout.agent import run_episode
from megatron_webrl.rollout.browsers import open_browsers
from megatron_webrl.rollout.generation import Responder
from megatron_webrl.rollout.toolset import Toolset
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.types import Task, Trajectory

log = logging.getLogger(__name__)


@dataclass
class Episodes:
    """What every episode of a worker shares: task source, browsers, processor."""

    config: Config
    source: TaskSource
    browsers: Browsers
    processor: Processor

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config, processor: Processor, name: str) -> AsyncIterator[Episodes]:
        """Open the task source and the browsers of the worker `name`; both end with the context."""
        source = make_source(config.tasks)
        sessions = config.rollout.groups_in_flight * config.rollout.group_size
        try:
            async with open_browsers(config, sessions, name) as browsers:
                yield cls(config, source, browsers, processor)
        finally:
            source.close()

    async def run(self, responder: Responder, ticket: int, index: int, incarnation: int) -> Trajectory:
        """One episode of a ticket's group. Without a browser it is masked, not raised."""
        task, started = self.source.task(self.config.run.seed, ticket), time.monotonic()
        try:
            async with self.browsers.session() as session:
                return await run_episode(
                    responder, session, self.processor, task, self.config.rollout,
                    ticket=ticket, index=index, group_size=self.config.rollout.group_size, incarnation=incarnation,
                    toolset=Toolset.of(self.config.browser),
                )  # fmt: skip
        except BrowserError as error:
            log.warning("episode %d of ticket %d has no browser: %s", index, ticket, error)
            return self._without_session(task, ticket, index, incarnation, error.outcome, time.monotonic() - started)

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
