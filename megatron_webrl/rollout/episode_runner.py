"""Run an episode: browser, agent, stepping, retries, limits of time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from megatron_webrl.browser.errors import BrowserError, TaskRefused
from megatron_webrl.browser.server.client import BrowserClient, RemoteSession
from megatron_webrl.browser.server.local_servers import local_servers
from megatron_webrl.browser.server.protocol import SessionSpec
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.tickets import TicketClaim
from megatron_webrl.judge import evaluation as judge
from megatron_webrl.judge.budget import UsageMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator, with_verdict
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import ContextOverflow, Prompt, PromptContext, make_context
from megatron_webrl.rollout.generator import Generation, GenerationError, Generator
from megatron_webrl.rollout.responses import memory_characters
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, ParsedCall, Toolset, parse_tool_call
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.source import TaskSource, referenced_task
from megatron_webrl.track import live_rollouts
from megatron_webrl.track.episodes import TRAINING
from megatron_webrl.track.live_rollouts import LiveRollout, RolloutTable
from megatron_webrl.track.timeline import NO_TRACK, OFF, Span, Timeline, Track
from megatron_webrl.types import FAULT_OUTCOMES, Observation, Step, Task, Trajectory
from megatron_webrl.util.clock import steady_time

if TYPE_CHECKING:
    from megatron_webrl.rollout.teacher import Teacher


class Deadline:
    """Ends an episode within `scope` at its time limit, or upon `expire` at any time; `outcome` names the reason."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds, self.outcome = timeout_seconds, "episode_timeout"  # from when it has a browser
        self._expired = False
        self._scope: asyncio.Timeout | None = None

    def expire(self, outcome: str) -> None:
        """End the current scope and all later ones; `outcome` masks the episode."""
        self._expired, self.outcome = True, outcome
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def scope(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Raise TimeoutError after `seconds` (None: no limit), or once the deadline is expired.

        `expired()` of the yielded timeout distinguishes this TimeoutError from one raised inside the scope.
        """
        scope = asyncio.timeout(0 if self._expired else seconds)
        async with scope:
            self._scope = scope
            try:
                yield scope
            finally:
                self._scope = None


log = logging.getLogger(__name__)


class EpisodeStepper(Protocol):
    """Delays the generations of one episode."""

    def generation_phase(self) -> AbstractAsyncContextManager[None]:
        """Context of one generation: entering waits until it may begin, leaving until the agent may act."""
        ...


class SteppingMode(Protocol):
    """Coordinates the episodes of a worker."""

    def register_episode(self) -> AbstractContextManager[EpisodeStepper]:
        """Context of one episode, from before the reset to its end."""
        ...


class FreeStepping:
    """Episodes do not wait for each other (rollout.stepping=free)."""

    def generation_phase(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def register_episode(self) -> AbstractContextManager[EpisodeStepper]:
        return nullcontext(self)


class Lockstep:
    """Rounds of a worker's episodes: all generate, then all act (rollout.stepping=lockstep).

    A round begins once every episode waits for it. No episode acts before all episodes of the round have their
    responses. An episode that ends leaves the round; the next round waits for an episode that starts during a round.

        a  reset | generate ....... | act    | generate ... | act
        b  reset | generate .. wait | act .. | generate ... | act
        c              reset, wait  .  wait  | generate .   wait | act

    After a wait of `timeout_seconds` an episode continues without the missing ones, which join the next round.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._members: set[_Member] = set()  # running episodes
        self._round: set[_Member] = set()  # episodes that still generate
        self._entering: dict[_Member, asyncio.Future[None]] = {}
        self._leaving: dict[_Member, asyncio.Future[None]] = {}

    @contextmanager
    def register_episode(self) -> Iterator[EpisodeStepper]:
        member = _Member(self)
        self._members.add(member)
        try:
            yield member
        finally:
            self._members.discard(member)
            self._advance()

    async def wait_for_round_start(self, member: _Member) -> None:
        began = self._entering[member] = asyncio.get_running_loop().create_future()
        try:
            self._advance()
            while not await _done(began, self._timeout_seconds):
                if not self._round and not self._leaving:
                    missing = len(self._members) - len(self._entering)
                    log.warning(
                        "starting a round without %d episodes, which did not finish their actions within %g s",
                        missing,
                        self._timeout_seconds,
                    )
                    self._begin()
        finally:
            self._entering.pop(member, None)

    async def wait_for_round_end(self, member: _Member) -> None:
        """Wait until all episodes of the round have their responses."""
        over = self._leaving[member] = asyncio.get_running_loop().create_future()
        try:
            self.stop_generating(member)
            if not await _done(over, self._timeout_seconds):
                log.warning(
                    "an episode acts before %d other episodes, which have no response within %g s",
                    len(self._round),
                    self._timeout_seconds,
                )
        finally:
            self._leaving.pop(member, None)
            self._advance()

    def stop_generating(self, member: _Member) -> None:
        self._round.discard(member)
        self._advance()

    def _advance(self) -> None:
        if self._round:
            return
        for over in self._leaving.values():
            _resolve(over)
        if not self._leaving and self._entering and len(self._members) == len(self._entering):
            self._begin()

    def _begin(self) -> None:
        self._round = set(self._entering)
        for began in self._entering.values():
            _resolve(began)
        self._entering.clear()


class _Member:
    """One episode of a Lockstep."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep

    @asynccontextmanager
    async def generation_phase(self) -> AsyncIterator[None]:
        try:
            await self._lockstep.wait_for_round_start(self)
            yield
        except BaseException:
            self._lockstep.stop_generating(self)
            raise
        await self._lockstep.wait_for_round_end(self)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _done(future: asyncio.Future[None], timeout_seconds: float) -> bool:
    """Whether the future completes within the limit."""
    await asyncio.wait((future,), timeout=timeout_seconds)
    return future.done()


MAX_PAGE_FIELD_CHARS = 1000  # of a URL and a title in a step


@dataclass
class _Episode:
    """Data of a running episode; a fault that ends the episode does not lose them."""

    context: PromptContext
    instruction: str = ""
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None


async def run_episode(
    generator: Generator, session: RemoteSession, processor: Processor, task: Task, settings: RolloutConfig,
    *, ticket: int, index: int, group_size: int, restart_epoch: int, toolset: Toolset = COORDINATE_TOOLSET,
    deadline: Deadline | None = None, stepper: EpisodeStepper | None = None, max_go_backs: int = 0,
    live: LiveRollout | None = None, track: Track = NO_TRACK,
) -> Trajectory:  # fmt: skip
    """Run `task` in a fresh session with the actions of `toolset`; returns the trajectory without outcome and verdict.

    `deadline` may end it early; `stepper` delays generations; `max_go_backs`: consecutive go_back actions on the start
    page that end it, 0: none do; `live` shows its state, `track` is its row of the timeline. A fault of engine or
    browser, a context overflow or a timeout does not raise: the trajectory keeps the steps so far, and its end_reason
    names the fault.
    """
    started = time.monotonic()
    context = make_context(processor, settings.context, settings.max_model_len - settings.max_new_tokens, toolset)
    episode = _Episode(context, instruction=task.instruction or "")
    deadline, stepper = deadline or Deadline(settings.episode_timeout_seconds), stepper or FreeStepping()
    scope, live = None, live or LiveRollout(task)

    def trajectory(end_reason: str) -> Trajectory:
        return Trajectory(
            ticket=ticket, index=index, group_size=group_size, restart_epoch=restart_epoch,
            task=task, instruction=episode.instruction, steps=tuple(episode.steps),
            images=tuple(episode.context.screenshots), reward=0.0, outcome=end_reason,
            end_reason=end_reason, page_reward=episode.reward, temperature=settings.temperature,
            seconds=time.monotonic() - started, finished_at=steady_time(),
        )  # fmt: skip

    live.episode_so_far = lambda: trajectory("")
    try:
        async with deadline.scope(deadline.timeout_seconds) as scope:
            end_reason = await _run_steps(
                episode, generator, session, processor, task, toolset, stepper, max_go_backs, settings.lenient_actions,
                live, track,
            )  # fmt: skip
    except TimeoutError:
        if scope is None or not scope.expired():
            raise
        end_reason = deadline.outcome
    except (BrowserError, ContextOverflow, GenerationError) as error:
        end_reason = "engine_error" if isinstance(error, GenerationError) else error.outcome
        log.warning("episode %d of ticket %d, %s, is masked as %s: %s", index, ticket, task.id, end_reason, error)
    return trajectory(end_reason)


async def _run_steps(
    episode: _Episode, generator: Generator, session: RemoteSession, processor: Processor, task: Task, toolset: Toolset,
    stepper: EpisodeStepper, max_go_backs: int, lenient: bool, live: LiveRollout, track: Track,
) -> str:  # fmt: skip
    """Observe, generate and act until page, agent or a limit end the episode; returns the end reason."""
    live.set(live_rollouts.NAVIGATING)
    with track.span("reset") as resetting:
        try:
            observation = await session.reset(task)
        except ConfigError:
            raise
        except ValueError as refused:  # one row of a file is no reason to end a worker
            raise TaskRefused(str(refused)) from refused
        _add_seconds(resetting, observation)
    live.set(live_rollouts.OBSERVING)
    start_url, go_backs = observation.url, 0
    episode.instruction = observation.instruction or episode.instruction
    episode.context.start_episode(episode.instruction, observation)
    for _ in range(task.max_steps):
        prompt = episode.context.build_prompt()
        live.set(live_rollouts.WAITING_FOR_STEP)
        async with stepper.generation_phase():
            live.set(live_rollouts.WAITING_FOR_MODEL)
            with track.span("generate", step=len(episode.steps) + 1) as generating:
                images = [episode.context.screenshots[index] for index in prompt.image_indices]
                generation = await generator.generate(session, prompt.token_ids, images)
                generating.facts["tokens"] = len(generation.response_token_ids)
            live.set(live_rollouts.WAITING_FOR_STEP)
        with track.span("act", step=len(episode.steps) + 1) as acting:
            call = _parse(generation, processor, toolset, lenient)
            action, error = call.action, call.format_error
            before = observation
            if action is not None:
                live.set(live_rollouts.ACTING)
                observation = await session.step(action)
                acting.facts["kind"] = action.kind
                _add_seconds(acting, observation)
        seconds = generating.seconds, acting.seconds
        changed = action is not None and observation.page_changed
        step = _step(prompt, generation, call, before, changed, seconds)
        episode.steps.append(replace(step, not_recorded_requests=observation.not_recorded_requests))
        live.end_step(generation.versions.tolist())
        episode.context.add_step(generation, action, error, observation)
        episode.reward = observation.reward
        if observation.done:
            return judge.DONE
        if action is not None and action.kind == "answer":
            return judge.ANSWER
        at_start = action is not None and action.kind == "go_back" and before.url == start_url
        go_backs = go_backs + 1 if at_start else 0
        if go_backs and go_backs == max_go_backs:
            return judge.GO_BACKS
    return judge.STEPS_EXHAUSTED


def _add_seconds(span: Span, observation: Observation) -> None:
    if observation.seconds is not None:
        span.facts |= asdict(observation.seconds)


def _parse(generation: Generation, processor: Processor, toolset: Toolset, lenient: bool) -> ParsedCall:
    """The response's action, or the name of its format error. The decoded text does not show special tokens."""
    if processor.has_special_tokens(generation.response_token_ids):
        return ParsedCall(None, "special_token")
    return parse_tool_call(generation.text, toolset, lenient)


def _step(
    prompt: Prompt, generation: Generation, call: ParsedCall, before: Observation, page_changed: bool,
    seconds: tuple[float, float],
) -> Step:  # fmt: skip
    """`before`: the observation that the response acted on; `seconds`: of the generation, and in the browser."""
    return Step(
        prompt_token_ids=generation.prompt_token_ids, response_token_ids=generation.response_token_ids,
        logprobs=generation.logprobs, versions=generation.versions, images=prompt.image_indices,
        image_grids=generation.image_grids, finish_reason=generation.finish_reason, action=call.action,
        format_error=call.format_error, leniencies=call.leniencies, page_changed=page_changed,
        url=before.url[:MAX_PAGE_FIELD_CHARS], title=before.title[:MAX_PAGE_FIELD_CHARS],
        response_characters=len(generation.text), memory_characters=memory_characters(generation.text),
        seconds_generation=seconds[0], seconds_browser=seconds[1],
        cached_prompt_tokens=generation.cached_prompt_tokens, experts=generation.experts,
    )  # fmt: skip


@asynccontextmanager
async def open_browsers(config: Config, sessions: int, name: str) -> AsyncIterator[BrowserClient]:
    """Browsers for `sessions` concurrent episodes; `name` identifies the worker to servers and in log file names.

    Raises ProcessError (a local server), BrowserError (no server answers), ConfigError (one has other settings).
    """
    rollout = config.rollout
    if config.browser.servers:
        async with BrowserClient(
            config.browser.servers,
            step_seconds=rollout.operation_timeout_seconds,
            wait_seconds=rollout.episode_timeout_seconds,
            spec=SessionSpec.from_config(config.browser),
            owner=f"{config.run.name}/{name}",
        ) as browsers:
            await browsers.wait_until_ready(config.run.startup_timeout_seconds)
            yield browsers
        return
    async with (
        local_servers(config, sessions, config.run_folder / "logs", f"{name}-browsers") as servers,
        BrowserClient(
            servers.poll_addresses,
            servers.token,
            step_seconds=rollout.operation_timeout_seconds,
            wait_seconds=rollout.episode_timeout_seconds,
        ) as browsers,
    ):
        yield browsers


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
    from megatron_webrl.rollout.teacher import Teacher  # imports openai, which takes a second

    return Teacher.open(config, processor)
