"""The agent: one episode, from reset to its end. Evaluators decide its outcome later, without the browser."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field, replace

from megatron_webrl.browser.errors import BrowserError, TaskRefused
from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge import outcome as judge
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.actions import ParsedCall, parse_tool_call
from megatron_webrl.rollout.contexts.base import ContextOverflow, Prompt, PromptContext
from megatron_webrl.rollout.contexts.policies import make_context
from megatron_webrl.rollout.deadline import Deadline
from megatron_webrl.rollout.generator import Generation, GenerationError, Generator
from megatron_webrl.rollout.responses import memory_characters
from megatron_webrl.rollout.stepping import EpisodeStepper, FreeStepping
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset
from megatron_webrl.track import live_rollouts
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.track.timeline import NO_TRACK, Span, Track
from megatron_webrl.types import Observation, Step, Task, Trajectory
from megatron_webrl.util.clock import steady_time

log = logging.getLogger(__name__)

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
