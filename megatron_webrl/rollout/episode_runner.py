"""Run episodes with what all of a worker share: tasks, browsers, evaluators, the teacher."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.browser.server.local_servers import local_servers
from megatron_webrl.browser.server.protocol import SessionSpec
from megatron_webrl.config.import_path import find_function, find_subclass
from megatron_webrl.config.loss import RewardConfig
from megatron_webrl.config.rollout import AgentConfig, HarnessConfig, OwnAgentConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import TicketClaim
from megatron_webrl.judge.budget import UsageMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator, with_verdict
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.agent import Agent, DeadlineExpired, Episode
from megatron_webrl.rollout.generator import Generator
from megatron_webrl.rollout.stepping import Lockstep
from megatron_webrl.rollout.toolset import Toolset
from megatron_webrl.tasks.mix import TaskMix, referenced_task
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.track import live_rollouts
from megatron_webrl.track.episodes import TRAINING
from megatron_webrl.track.evaluations import EvaluationRequest
from megatron_webrl.track.live_rollouts import RolloutTable
from megatron_webrl.track.timeline import OFF, Timeline, Track
from megatron_webrl.types import FAULT_OUTCOMES, REWARD_ERROR, Trajectory

if TYPE_CHECKING:
    from megatron_webrl.rollout.teacher import Teacher

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_browsers(config: Config, sessions: int, name: str) -> AsyncIterator[BrowserClient]:
    """Browsers for `sessions` concurrent episodes; `name` identifies the worker to servers and in log file names.

    Raises ProcessError (a local server), BrowserError (no server answers), ConfigError (one has other settings).
    """
    step_seconds, wait_seconds = config.rollout.operation_timeout_seconds, config.rollout.episode_timeout_seconds
    connect = partial(BrowserClient, step_seconds=step_seconds, wait_seconds=wait_seconds)
    if config.browser.servers:
        spec, owner = SessionSpec.from_config(config.browser), f"{config.run.name}/{name}"
        async with connect(config.browser.servers, spec=spec, owner=owner) as browsers:
            await browsers.wait_until_ready(config.run.startup_timeout_seconds)
            yield browsers
    else:
        async with (
            local_servers(config, sessions, config.run_folder / "logs", f"{name}-browsers") as servers,
            connect(servers.poll_addresses, servers.token) as browsers,
        ):
            yield browsers


RETRIES = 1  # a second fault of browser or engine in a row is rarely chance


async def run_with_retries(run_try: Callable[[], Awaitable[Trajectory]], name: str) -> Trajectory:
    """Run tries at an episode until one ends without a fault, at most 1 + RETRIES; returns the last one's trajectory.

    It counts the replaced tries (Trajectory.tries, discarded_tokens). `name`: of the episode, for the log.
    """
    discarded_tokens = 0
    for number in range(1, RETRIES + 2):
        trajectory = await run_try()
        if trajectory.outcome not in FAULT_OUTCOMES or number > RETRIES:
            break
        log.info("retrying %s after %s", name, trajectory.outcome)
        discarded_tokens += trajectory.response_tokens
    return replace(trajectory, tries=number, discarded_tokens=discarded_tokens)


@dataclass
class EpisodeRunner:
    """Runs the episodes of a worker: the agent, then evaluators and teacher."""

    config: Config
    task_source: TaskSource | TaskMix
    agent: Agent
    evaluator: EpisodeEvaluator
    live: RolloutTable = field(default_factory=RolloutTable)
    timeline: Timeline = OFF
    teacher: Teacher | None = None  # scores training episodes for distillation
    reward: Callable[[Trajectory], float] | None = None  # trainer.reward.function, of training episodes

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: Config, processor: Processor, name: str, meter: UsageMeter,
        trains: bool = False, timeline: Timeline = OFF,
    ) -> AsyncIterator[EpisodeRunner]:  # fmt: skip
        """Open the task source, the browsers and the evaluators of the worker `name`, and close all at the end.

        If it `trains`, also the teacher, if there is one. `meter` counts the use of judge models.
        """
        rollout, source = config.rollout, make_source(config.tasks)
        lockstep = Lockstep(rollout.operation_timeout_seconds) if rollout.stepping == "lockstep" else None
        try:
            async with (
                open_browsers(config, config.sessions_per_worker, name) as browsers,
                open_evaluator(config.judge, meter, config.tasks.evaluators) as evaluator,
                _open_teacher(config, processor, trains) as teacher,
            ):
                agent = agent_class(rollout.agent)(browsers, processor, Toolset.from_config(config.browser), lockstep)
                reward = find_reward(config.trainer.reward)
                yield cls(config, source, agent, evaluator, timeline=timeline, teacher=teacher, reward=reward)
        finally:
            source.close()

    def new_try(self, claim: TicketClaim, index: int) -> Episode:
        """A try at an episode of a group. Raises ConfigError for a task that the source does not have."""
        task, rollout = referenced_task(self.task_source, claim.task), self.config.rollout
        live = self.live.open(TRAINING, claim.ticket, index, rollout.group_size, task)
        return Episode(rollout, live, claim.restart_epoch, Track(self.timeline, f"episode {claim.ticket}.{index}"))

    async def run_try(
        self, generator: Generator, episode: Episode, on_acted: Callable[[], None] = lambda: None
    ) -> Trajectory:
        """Run and evaluate a training episode. Calls `on_acted` when its browser is released. Raises BudgetSpent."""
        labels = {"ticket": episode.live.ticket, "index": episode.live.index, "epoch": episode.restart_epoch}
        with episode.track.span("episode", **labels) as span:
            trajectory = await self.agent.run(generator, episode)
            on_acted()
            with episode.track.span("judge"):
                trajectory = await self._evaluate(episode, trajectory, self.teacher)
            span.facts["outcome"] = trajectory.outcome
        return trajectory

    async def run_held_out(self, generator: Generator, request: EvaluationRequest, number: int) -> Trajectory:
        """Run an episode of an evaluation; a fault that persists after retries is its outcome. Raises BudgetSpent."""
        index, sample = request.task_and_sample(number)
        rollout = replace(self.config.rollout, temperature=request.temperature)
        task, agent = self.task_source.held_out_task(index), replace(self.agent, lockstep=None)
        live = self.live.open(request.name, index, sample, request.samples, task)

        async def run_try() -> Trajectory:
            track = Track(self.timeline, f"evaluation {index}.{sample}")
            episode = Episode(rollout, live, track=track, in_training=False)
            return await self._evaluate(episode, await agent.run(generator, episode))

        return await run_with_retries(run_try, f"sample {sample} of held-out task {index}")

    async def _evaluate(self, episode: Episode, trajectory: Trajectory, teacher: Teacher | None = None) -> Trajectory:
        """The trajectory with its verdict and the teacher's scores; the episode's deadline ends it early, as masked."""
        episode.live.set(live_rollouts.JUDGING)
        try:
            async with episode.deadline.scope():  # evaluators and the teacher have their own limits
                evaluated = with_verdict(trajectory, await self.evaluator.evaluate(trajectory))
                if episode.in_training and self.reward is not None:
                    evaluated = with_reward(evaluated, self.reward)
                if teacher is not None:
                    evaluated = await teacher.scored(evaluated)
        except DeadlineExpired as expired:
            evaluated = replace(trajectory, outcome=expired.outcome, end_reason=expired.outcome)
        episode.live.finish(evaluated.outcome)
        return evaluated


def agent_class(settings: AgentConfig) -> Callable[..., Agent]:
    """The class of rollout.agent, with its options. Raises ConfigError for an import path of no agent."""
    if isinstance(settings, HarnessConfig):
        from megatron_webrl.rollout.harness import HarnessAgent  # imports aiohttp's server

        if settings.function:
            find_function(settings.function, "rollout.agent.command", ("episode",))
        return partial(HarnessAgent, settings=settings)
    if not isinstance(settings, OwnAgentConfig):
        return Agent
    return find_subclass(settings.name, "rollout.agent.name", Agent, settings.options)


def find_reward(settings: RewardConfig) -> Callable[[Trajectory], float] | None:
    """What trainer.reward.function names; None without it. Raises ConfigError."""
    if not settings.function:
        return None
    return find_function(settings.function, "trainer.reward.function", ("trajectory",), settings.options)


def with_reward(trajectory: Trajectory, function: Callable[[Trajectory], float]) -> Trajectory:
    """A judged trajectory with the reward of a function of the user's own, unless the verdict masks it.

    A function that raises, or gives no finite number, masks the episode as REWARD_ERROR.
    """
    if not trajectory.trainable:
        return trajectory
    try:
        reward = float(function(trajectory))
        if math.isfinite(reward):
            return replace(trajectory, reward=reward)
        log.error("trainer.reward.function gave %s", reward)
    except Exception:  # the user's function can raise anything; one episode must not end a worker
        log.exception("trainer.reward.function failed on ticket %d, index %d", trajectory.ticket, trajectory.index)
    return replace(trajectory, outcome=REWARD_ERROR)


def _open_teacher(config: Config, processor: Processor, trains: bool) -> AbstractAsyncContextManager[Teacher | None]:
    if not trains or not config.trainer.distillation.coefficient:
        return nullcontext()
    from megatron_webrl.rollout.teacher import Teacher  # imports openai, which takes a second

    return Teacher.open(config, processor)
