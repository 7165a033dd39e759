"""Tickets become episodes: the task that a ticket means, a browser session, the agent."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config.schema import Config
from megatron_webrl.farm.client import BrowserClient
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.agent import run_episode
from megatron_webrl.rollout.browsers import open_browsers
from megatron_webrl.rollout.deadline import Deadline
from megatron_webrl.rollout.generator import Generator
from megatron_webrl.rollout.stepping import FreeStepping, Lockstep, SteppingMode
from megatron_webrl.rollout.toolset import Toolset
from megatron_webrl.sampling.states import SamplerStateReader
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.types import Task, Trajectory

log = logging.getLogger(__name__)


@dataclass
class EpisodeRunner:
    """What every episode of a worker shares: task source, browsers, processor, pace."""

    config: Config
    task_source: TaskSource
    browsers: BrowserClient
    processor: Processor
    stepping: SteppingMode
    sampler_states: SamplerStateReader | None = None  # None: the settings alone say which task a ticket means

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: Config, processor: Processor, name: str, states: SamplerStateReader | None = None
    ) -> AsyncIterator[EpisodeRunner]:
        """Open the task source and the browsers of the worker `name`; both end with the context."""
        source = make_source(config.tasks)
        sessions = config.rollout.groups_in_flight * config.rollout.group_size
        sessions += config.evaluation.concurrency if config.evaluation.every else 0
        try:
            async with open_browsers(config, sessions, name) as browsers:
                rollout = config.rollout
                lockstep = rollout.stepping == "lockstep"
                pacing: SteppingMode = Lockstep(rollout.operation_timeout_seconds) if lockstep else FreeStepping()
                yield cls(config, source, browsers, processor, pacing, states)
        finally:
            source.close()

    async def run_episode(
        self, responder: Generator, ticket: int, index: int, restart_epoch: int, deadline: Deadline | None = None
    ) -> Trajectory:
        """One try at an episode of a ticket's group. Without a browser it is masked, not raised.

        `limit` may end it before its time. Raises JobFailed if the ticket's sampler state does not come, Stopped if the
        job ends meanwhile.
        """
        probabilities = None if self.sampler_states is None else await self.sampler_states.probabilities(ticket)
        task, started = self.task_source.training_task(self.config.run.seed, ticket, probabilities), time.monotonic()
        deadline = deadline or Deadline(self.config.rollout.episode_timeout_seconds)
        scope = None
        try:
            async with AsyncExitStack() as stack:
                async with deadline.scope(None) as scope:  # who gives sessions has a limit of its own
                    session = await stack.enter_async_context(self.browsers.session())
                pace = stack.enter_context(self.stepping.register_episode())
                return await run_episode(
                    responder, session, self.processor, task, self.config.rollout,
                    ticket=ticket, index=index, group_size=self.config.rollout.group_size, restart_epoch=restart_epoch,
                    toolset=Toolset.from_config(self.config.browser), deadline=deadline, stepper=pace,
                )  # fmt: skip
        except BrowserError as error:
            log.warning("episode %d of ticket %d has no browser: %s", index, ticket, error)
            outcome = error.outcome
        except TimeoutError:
            if scope is None or not scope.expired():
                raise
            outcome = deadline.outcome
        return self._without_session(task, ticket, index, restart_epoch, outcome, time.monotonic() - started)

    def _without_session(
        self, task: Task, ticket: int, index: int, incarnation: int, outcome: str, seconds: float
    ) -> Trajectory:
        return Trajectory(
            ticket=ticket,
            index=index,
            group_size=self.config.rollout.group_size,
            restart_epoch=incarnation,
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
