"""Run an episode of a ticket: determine the task, lease a browser session, run the agent."""

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
from megatron_webrl.rollout.browsers import open_browsers, sessions_per_worker
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
    """Resources that all episodes of a worker share."""

    config: Config
    task_source: TaskSource
    browsers: BrowserClient
    processor: Processor
    stepping: SteppingMode
    sampler_states: SamplerStateReader | None = None  # None: the sampler's probabilities are constant

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: Config, processor: Processor, name: str, states: SamplerStateReader | None = None
    ) -> AsyncIterator[EpisodeRunner]:
        """Open the task source and the browsers of the worker `name`, and close both at the end."""
        source = make_source(config.tasks)
        try:
            async with open_browsers(config, sessions_per_worker(config), name) as browsers:
                rollout = config.rollout
                lockstep = rollout.stepping == "lockstep"
                stepping: SteppingMode = Lockstep(rollout.operation_timeout_seconds) if lockstep else FreeStepping()
                yield cls(config, source, browsers, processor, stepping, states)
        finally:
            source.close()

    async def run_episode(
        self, generator: Generator, ticket: int, index: int, restart_epoch: int, deadline: Deadline | None = None
    ) -> Trajectory:
        """Run one try at an episode; a missing browser masks it. Raises JobFailed without a sampler state, JobEnded."""
        probabilities = None if self.sampler_states is None else await self.sampler_states.probabilities(ticket)
        task, started = self.task_source.training_task(self.config.run.seed, ticket, probabilities), time.monotonic()
        deadline = deadline or Deadline(self.config.rollout.episode_timeout_seconds)
        scope = None
        try:
            async with AsyncExitStack() as stack:
                async with deadline.scope(None) as scope:  # the browser client has its own limit
                    session = await stack.enter_async_context(self.browsers.session())
                stepper = stack.enter_context(self.stepping.register_episode())
                return await run_episode(
                    generator, session, self.processor, task, self.config.rollout,
                    ticket=ticket, index=index, group_size=self.config.rollout.group_size, restart_epoch=restart_epoch,
                    toolset=Toolset.from_config(self.config.browser), deadline=deadline, stepper=stepper,
                )  # fmt: skip
        except BrowserError as error:
            log.warning("episode %d of ticket %d got no browser: %s", index, ticket, error)
            outcome = error.outcome
        except TimeoutError:
            if scope is None or not scope.expired():
                raise
            outcome = deadline.outcome
        return self._without_session(task, ticket, index, restart_epoch, outcome, time.monotonic() - started)

    def _without_session(
        self, task: Task, ticket: int, index: int, restart_epoch: int, outcome: str, seconds: float
    ) -> Trajectory:
        return Trajectory(
            ticket=ticket,
            index=index,
            group_size=self.config.rollout.group_size,
            restart_epoch=restart_epoch,
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
