"""Run an episode of a ticket: determine the task, lease a browser session, run the agent, evaluate the episode."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.control.tickets import TicketClaim
from megatron_webrl.judge.budget import UsageMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from megatron_webrl.judge.outcome import with_verdict
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.agent import run_episode
from megatron_webrl.rollout.browsers import open_browsers
from megatron_webrl.rollout.deadline import Deadline
from megatron_webrl.rollout.generator import Generator
from megatron_webrl.rollout.stepping import FreeStepping, Lockstep, SteppingMode
from megatron_webrl.rollout.toolset import Toolset
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.source import TaskSource, referenced_task
from megatron_webrl.track import live_rollouts
from megatron_webrl.track.episodes import TRAINING
from megatron_webrl.track.live_rollouts import LiveRollout, RolloutTable
from megatron_webrl.track.timeline import NO_TRACK, OFF, Timeline, Track
from megatron_webrl.types import FAULT_OUTCOMES, Task, Trajectory
from megatron_webrl.util.clock import steady_time

if TYPE_CHECKING:
    from megatron_webrl.rollout.teacher.scoring import Teacher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLabels:
    """Which episode a trajectory is."""

    ticket: int
    index: int
    group_size: int
    restart_epoch: int


async def run_with_retries(run_try: Callable[[], Awaitable[Trajectory]], retries: int, name: str) -> Trajectory:
    """Run tries at an episode until one ends without a fault, at most 1 + `retries`; returns the last one's trajectory.

    It counts the replaced tries (Trajectory.tries, discarded_tokens). `name`: of the episode, for the log.
    """
    discarded_tokens = 0
    for number in range(1, retries + 2):
        trajectory = await run_try()
        if trajectory.outcome not in FAULT_OUTCOMES or number > retries:
            break
        log.info("retrying %s after %s", name, trajectory.outcome)
        discarded_tokens += trajectory.response_tokens
    return replace(trajectory, tries=number, discarded_tokens=discarded_tokens)


@dataclass
class EpisodeRunner:
    """Resources that all episodes of a worker share."""

    config: Config
    task_source: TaskSource
    browsers: BrowserClient
    processor: Processor
    stepping: SteppingMode
    evaluator: EpisodeEvaluator
    live: RolloutTable = field(default_factory=RolloutTable)
    timeline: Timeline = OFF
    teacher: Teacher | None = None  # scores training episodes for distillation

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: Config, processor: Processor, name: str, meter: UsageMeter,
        trains: bool = False, timeline: Timeline = OFF,
    ) -> AsyncIterator[EpisodeRunner]:  # fmt: skip
        """Open the task source, the browsers and the evaluators of the worker `name`, and close all at the end.

        If it `trains`, also the teacher, if there is one. `meter` counts the use of judge models.
        """
        source = make_source(config.tasks)
        try:
            async with (
                open_browsers(config, config.sessions_per_worker, name) as browsers,
                open_evaluator(config.judge, meter) as evaluator,
                _open_teacher(config, processor, trains) as teacher,
            ):
                rollout = config.rollout
                lockstep = rollout.stepping == "lockstep"
                stepping: SteppingMode = Lockstep(rollout.operation_timeout_seconds) if lockstep else FreeStepping()
                yield cls(
                    config, source, browsers, processor, stepping, evaluator, timeline=timeline, teacher=teacher
                )  # fmt: skip
        finally:
            source.close()

    async def run_episode(
        self, generator: Generator, claim: TicketClaim, index: int, deadline: Deadline | None = None,
        on_acted: Callable[[], None] = lambda: None,
    ) -> Trajectory:  # fmt: skip
        """Run one try at an episode; a missing browser masks it. Calls `on_acted` when its browser is released.

        Raises BudgetSpent, and ConfigError for a task that the source does not have.
        """
        task = referenced_task(self.task_source, claim.task)
        rollout, ticket = self.config.rollout, claim.ticket
        deadline = deadline or Deadline(rollout.episode_timeout_seconds)
        labels = EpisodeLabels(ticket, index, rollout.group_size, claim.restart_epoch)
        live = self.live.open(TRAINING, ticket, index, rollout.group_size, task)
        track = Track(self.timeline, f"episode {ticket}.{index}")
        with track.span("episode", ticket=ticket, index=index, epoch=claim.restart_epoch) as span:
            trajectory = await self.act(
                generator, task, labels, rollout, deadline, self.stepping, rollout.max_go_backs, live, track
            )
            on_acted()
            with track.span("judge"):
                trajectory = await self.evaluate(trajectory, deadline, live, self.teacher)
            span.facts["outcome"] = trajectory.outcome
        return trajectory

    async def act(
        self, generator: Generator, task: Task, labels: EpisodeLabels, rollout: RolloutConfig, deadline: Deadline,
        stepping: SteppingMode, max_go_backs: int, live: LiveRollout, track: Track = NO_TRACK,
    ) -> Trajectory:  # fmt: skip
        """Run the agent in a session of its own; returns the trajectory without a verdict. Faults do not raise."""
        started, scope = time.monotonic(), None
        live.start_try()
        try:
            async with AsyncExitStack() as stack:
                async with deadline.scope(None) as scope:  # the browser client has its own limit
                    with track.span("wait for browser"):
                        session = await stack.enter_async_context(self.browsers.session())
                stepper = stack.enter_context(stepping.register_episode())
                return await run_episode(
                    generator, session, self.processor, task, rollout, **asdict(labels),
                    toolset=Toolset.from_config(self.config.browser), deadline=deadline, stepper=stepper,
                    max_go_backs=max_go_backs, live=live, track=track,
                )  # fmt: skip
        except BrowserError as error:
            log.warning("episode %d of ticket %d got no browser: %s", labels.index, labels.ticket, error)
            end_reason = error.outcome
        except TimeoutError:
            if scope is None or not scope.expired():
                raise
            end_reason = deadline.outcome
        return Trajectory(
            **asdict(labels), task=task, instruction=task.instruction or "", steps=(), images=(), reward=0.0,
            outcome=end_reason, end_reason=end_reason, temperature=rollout.temperature,
            seconds=time.monotonic() - started, finished_at=steady_time(),
        )  # fmt: skip

    async def evaluate(
        self, trajectory: Trajectory, deadline: Deadline, live: LiveRollout, teacher: Teacher | None = None
    ) -> Trajectory:
        """The trajectory with its verdict and the scores of `teacher`; `deadline` ends it early, as masked.

        Raises BudgetSpent.
        """
        live.set(live_rollouts.JUDGING)
        evaluated = await self._evaluate(trajectory, deadline, teacher)
        live.finish(evaluated.outcome)
        return evaluated

    async def _evaluate(self, trajectory: Trajectory, deadline: Deadline, teacher: Teacher | None) -> Trajectory:
        scope = None
        try:
            async with deadline.scope(None) as scope:  # evaluators and the teacher have their own limits
                evaluated = with_verdict(trajectory, await self.evaluator.evaluate(trajectory))
                return evaluated if teacher is None else await teacher.scored(evaluated)
        except TimeoutError:
            if scope is None or not scope.expired():
                raise
            return replace(trajectory, outcome=deadline.outcome, end_reason=deadline.outcome)


def _open_teacher(config: Config, processor: Processor, trains: bool) -> AbstractAsyncContextManager[Teacher | None]:
    if not trains or not config.trainer.distillation.coefficient:
        return nullcontext()
    from megatron_webrl.rollout.teacher.scoring import Teacher  # imports openai, which takes a second

    return Teacher.open(config, processor)
