"""The agent: observe, generate, act and record, until the page, the agent or a limit ends the episode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_webrl.browser.errors import BrowserError, TaskRefused
from megatron_webrl.browser.server.client import BrowserClient, RemoteSession
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import ContextOverflow, Prompt, make_context
from megatron_webrl.rollout.generator import Generation, GenerationError, Generator
from megatron_webrl.rollout.responses import memory_characters, reasoning_of
from megatron_webrl.rollout.stepping import Lockstep, LockstepMember
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, ParsedCall, Toolset, parse_tool_call
from megatron_webrl.track import live_rollouts
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.track.timeline import NO_TRACK, Span, Track
from megatron_webrl.types import (
    ANSWER,
    DONE,
    EPISODE_TIMEOUT,
    GO_BACKS,
    MAX_REASONING_CHARS,
    STEPS_EXHAUSTED,
    Observation,
    Step,
    Task,
    Trajectory,
)
from megatron_webrl.util.clock import steady_time
from megatron_webrl.util.text import shorten

log = logging.getLogger(__name__)

MAX_PAGE_FIELD_CHARS = 1000  # of a URL and a title in a step


class AgentError(RuntimeError):
    """The agent cannot go on; the episode is masked."""

    outcome = "agent_error"


class DeadlineExpired(Exception):
    """The deadline of an episode has expired; `outcome` masks the episode."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Deadline:
    """Ends an episode within `scope` at its time limit, or upon `expire` at any time; `outcome` names the reason."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds, self.outcome = timeout_seconds, EPISODE_TIMEOUT  # from when it has a browser
        self._expired = False
        self._scope: asyncio.Timeout | None = None

    def expire(self, outcome: str) -> None:
        """End the current scope and all later ones; `outcome` masks the episode."""
        self._expired, self.outcome = True, outcome
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def scope(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Raise DeadlineExpired after `seconds` (None: no limit), or once `expire` is called."""
        scope = asyncio.timeout(0 if self._expired else seconds)
        try:
            async with scope:
                self._scope = scope
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExpired(self.outcome) from None
        finally:
            self._scope = None


MAX_GO_BACKS = 3  # from the start page, in a row: the agent does not spend an episode of training on leaving a website


@dataclass
class Episode:
    """One try at an episode: its data so far, and where its progress is shown."""

    settings: RolloutConfig
    live: LiveRollout  # names the episode and its task
    restart_epoch: int = 0
    track: Track = NO_TRACK
    in_training: bool = True
    instruction: str = ""
    steps: list[Step] = field(default_factory=list)
    screenshots: list[bytes] = field(default_factory=list)
    browser_images: list[int] | None = None  # indices of those that show the browser; None: all of them do
    page_reward: float | None = None
    oldest_version: int | None = None  # among the tokens of its responses
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.settings.episode_timeout_seconds)
        self.instruction = self.live.task.instruction or ""

    def observe(self, observation: Observation) -> None:
        self.instruction = observation.instruction or self.instruction
        self.page_reward = observation.reward

    @contextmanager
    def phase(self, name: str, state: str) -> Iterator[Span]:
        """Show a phase of a step in the live view and on the timeline, and measure it."""
        self.live.set(state)
        with self.track.span(name, step=len(self.steps) + 1) as span:
            yield span
        self.live.set(live_rollouts.WAITING_FOR_STEP)

    def record(self, step: Step) -> None:
        self.steps.append(step)
        versions = step.versions.tolist()
        known = [] if self.oldest_version is None else [self.oldest_version]
        self.oldest_version = min(known + versions, default=None)
        self.live.end_step(versions)

    def trajectory(self, end_reason: str = "") -> Trajectory:
        """The data so far, without verdict; the outcome is the reason of the end."""
        live = self.live
        return Trajectory(
            ticket=live.ticket, index=live.index, group_size=live.group_size, restart_epoch=self.restart_epoch,
            task=live.task, instruction=self.instruction, steps=tuple(self.steps), images=tuple(self.screenshots),
            reward=0.0, outcome=end_reason, end_reason=end_reason, page_reward=self.page_reward,
            browser_images=None if self.browser_images is None else tuple(self.browser_images),
            temperature=self.settings.temperature, seconds=time.monotonic() - self.started, finished_at=steady_time(),
        )  # fmt: skip


@dataclass(frozen=True)
class Agent:
    """Runs episodes with the actions of `toolset`; one serves all episodes of a worker."""

    browsers: BrowserClient
    processor: Processor
    toolset: Toolset = COORDINATE_TOOLSET
    lockstep: Lockstep | None = None  # with which episodes generate in rounds

    async def run(self, generator: Generator, episode: Episode) -> Trajectory:
        """Run an episode in a session of its own; returns the trajectory without outcome and verdict.

        A fault of engine or browser, a context overflow or the deadline does not raise: the trajectory keeps the steps
        so far, and its end_reason names the fault.
        """
        episode.live.start_try()
        try:
            async with AsyncExitStack() as stack:
                async with episode.deadline.scope():  # the browser client has its own limit
                    with episode.track.span("wait for browser"):
                        session = await stack.enter_async_context(self.browsers.session())
                member = stack.enter_context(self.lockstep.register_episode()) if self.lockstep else None
                episode.live.episode_so_far = episode.trajectory
                async with episode.deadline.scope(episode.deadline.timeout_seconds):
                    end_reason = await self.act(generator, session, member, episode)
        except DeadlineExpired as expired:
            end_reason = expired.outcome
        except (AgentError, BrowserError, ContextOverflow, GenerationError) as error:
            end_reason = error.outcome
            log.warning(
                "episode %d of ticket %d, %s, is masked as %s: %s",
                episode.live.index, episode.live.ticket, episode.live.task.id, end_reason, error,
            )  # fmt: skip
        return episode.trajectory(end_reason)

    async def act(
        self, generator: Generator, session: RemoteSession, member: LockstepMember | None, episode: Episode
    ) -> str:
        """Observe, generate, act and record, within the deadline of `run`; returns the end reason."""
        settings, task, go_backs = episode.settings, episode.live.task, 0
        prompt_limit = settings.max_model_len - settings.max_new_tokens
        context = make_context(self.processor, settings.context, prompt_limit, self.toolset)
        episode.screenshots = context.screenshots
        with episode.phase("reset", live_rollouts.NAVIGATING) as span:
            observation = await reset(session, task)
            _add_seconds(span, observation)
        episode.observe(observation)
        context.start_episode(episode.instruction, observation)
        start_url = observation.url
        for _ in range(task.max_steps):
            prompt = context.build_prompt()
            episode.live.set(live_rollouts.WAITING_FOR_STEP)
            async with member.generation_phase() if member else nullcontext():
                with episode.phase("generate", live_rollouts.WAITING_FOR_MODEL) as generating:
                    images = [context.screenshots[index] for index in prompt.image_indices]
                    generation = await generator.generate(session, prompt.token_ids, images)
                    generating.facts["tokens"] = len(generation.response_token_ids)
            with episode.phase("act", live_rollouts.ACTING) as acting:
                call, before = self._parse(generation, settings.action_parser), observation
                if call.action is not None:
                    observation = await session.step(call.action)
                    acting.facts["kind"] = call.action.kind
                    _add_seconds(acting, observation)
            episode.record(_step(prompt, generation, call, (before, observation), (generating.seconds, acting.seconds)))
            episode.observe(observation)
            context.add_step(generation, call.action, call.format_error, observation)
            kind = call.action.kind if call.action else None
            go_backs = go_backs + 1 if kind == "go_back" and before.url == start_url else 0
            if observation.done:
                return DONE
            if kind == "answer":
                return ANSWER
            if episode.in_training and go_backs == MAX_GO_BACKS:
                return GO_BACKS
        return STEPS_EXHAUSTED

    def _parse(self, generation: Generation, parser: str) -> ParsedCall:
        """The response's action, or the name of its format error. The decoded text does not show special tokens."""
        if self.processor.has_special_tokens(generation.response_token_ids):
            return ParsedCall(None, "special_token")
        return parse_tool_call(generation.text, self.toolset, parser)


async def reset(session: RemoteSession, task: Task) -> Observation:
    """Open the page of a task. Raises TaskRefused for a task that cannot be opened, BrowserError, ConfigError."""
    try:
        return await session.reset(task)
    except ConfigError:
        raise
    except ValueError as refused:  # one row of a file is no reason to end a worker
        raise TaskRefused(str(refused)) from refused


def _add_seconds(span: Span, observation: Observation) -> None:
    if observation.seconds is not None:
        span.facts |= asdict(observation.seconds)


def _step(
    prompt: Prompt, generation: Generation, call: ParsedCall, observations: tuple[Observation, Observation],
    seconds: tuple[float, float],
) -> Step:  # fmt: skip
    """`observations`: before and after the action; `seconds`: of the generation, and in the browser."""
    before, after = observations
    return generated_step(
        generation, prompt.image_indices, before, reasoning_of(generation.text), seconds[0], action=call.action,
        format_error=call.format_error, leniencies=call.leniencies,
        page_changed=call.action is not None and after.page_changed,
        memory_characters=memory_characters(generation.text), seconds_browser=seconds[1],
        not_recorded_requests=after.not_recorded_requests,
    )  # fmt: skip


def generated_step(
    generation: Generation, images: np.ndarray, page: Observation, reasoning: str, seconds: float, **others: Any
) -> Step:
    """A response as a step. `images`: int32 [images], indices of the prompt's; `page`: on which it acts."""
    return Step(
        prompt_token_ids=generation.prompt_token_ids, response_token_ids=generation.response_token_ids,
        logprobs=generation.logprobs, versions=generation.versions, images=images,
        image_grids=generation.image_grids, finish_reason=generation.finish_reason,
        url=page.url[:MAX_PAGE_FIELD_CHARS], title=page.title[:MAX_PAGE_FIELD_CHARS],
        response_characters=len(generation.text), reasoning=shorten(reasoning, MAX_REASONING_CHARS),
        seconds_generation=seconds, cached_prompt_tokens=generation.cached_prompt_tokens, experts=generation.experts,
        **others,
    )  # fmt: skip
