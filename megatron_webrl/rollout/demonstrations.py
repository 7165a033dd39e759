"""Record demonstrations: the agent with a scripted policy in place of the engine."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import PageTasksConfig, TasksConfig, task_parts
from megatron_webrl.judge.evaluation import page_verdict, with_verdict
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.rollout.agent import Agent, Episode
from megatron_webrl.rollout.contexts import format_response
from megatron_webrl.rollout.episode_runner import open_browsers
from megatron_webrl.rollout.generator import NO_LIMITS, Generation, GenerationError, ResponseLimits
from megatron_webrl.rollout.responses import THOUGHT_CLOSE
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.mix import TaskMix
from megatron_webrl.tasks.registry import make_source, required_actions, scripted_environments
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.types import Action, Trajectory
from megatron_webrl.util.concurrency import run_together

log = logging.getLogger(__name__)

FIRST_DEMONSTRATION_TICKET = 2**40  # disjoint from training tickets, and so are the page seeds
MAX_SESSIONS = 8
MEMORY_SLOTS = 8  # of a scripted Memory
GENERIC_SLOT, GENERIC_SLOT_PROBABILITY = "the page", 0.5  # of each step
MAX_FAILURES = 20  # failed episodes, beyond a tenth of the requested number, after which recording fails


def scripted_generation(processor: Processor, token_ids: np.ndarray, images: Sequence[bytes], text: str) -> Generation:
    """`text` as a response, with log-probabilities of zero. The prompt has one placeholder per image."""
    response, grids = processor.encode_response(text), processor.grids(images)
    return Generation(
        prompt_token_ids=processor.expand_image_tokens(token_ids, grids),
        response_token_ids=response,
        logprobs=np.zeros(len(response), np.float32),
        versions=np.zeros(len(response), np.int32),
        image_grids=grids,
        text=processor.thought_prefix + text,
        finish_reason="stop",
    )


def extend_memory(slots: Sequence[str], action: Action, draw: random.Random) -> list[str]:
    """The slots of a Memory after one more action: one for it, and at times one of no use, up to MEMORY_SLOTS."""
    generic = [GENERIC_SLOT] if draw.random() < GENERIC_SLOT_PROBABILITY else []
    return [*slots, action.kind, *generic][:MEMORY_SLOTS]


def memory_text(slots: Sequence[str]) -> str:
    """The Memory of a scripted response in the form memory_compact: `left_click; the page; wait;`."""
    return " ".join(f"{slot};" for slot in slots)


class ScriptedGenerator:
    """Responds with the next action of the task's script.

    Can serve many sessions, unless mistakes or a Memory make it that of one episode. `premature_submit_probability`: of
    each step, to submit whatever is left to do.
    """

    def __init__(
        self, processor: Processor, settings: RolloutConfig, toolset: Toolset = COORDINATE_TOOLSET,
        premature_submit_probability: float = 0.0, seed: str = "",
    ) -> None:  # fmt: skip
        self._processor, self._settings, self._toolset = processor, settings, toolset
        self._premature_submit_probability, self._random = premature_submit_probability, random.Random(seed)
        self._slots, self._memory_random = list[str](), random.Random(f"{seed}/memory")

    async def generate(
        self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes],
        limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        """The script's action as a response. Raises GenerationError: none, or too many tokens; BrowserError."""
        try:
            premature = self._random.random() < self._premature_submit_probability
            action = await session.demonstration(premature_submit=premature)
        except ScriptedPolicyError as error:
            raise GenerationError(str(error)) from error
        memory = "{}"
        if self._settings.context.response_format == "memory_compact":
            if action.note is None:
                self._slots = extend_memory(self._slots, action, self._memory_random)
            else:
                self._slots = [action.note]
            memory = memory_text(self._slots)
        closing = f"{THOUGHT_CLOSE}\n\n" if self._processor.thought_prefix else ""
        text = closing + format_response(action, self._settings.context, self._toolset, memory)
        generation = scripted_generation(self._processor, token_ids, images, text)
        if (tokens := len(generation.response_token_ids)) > self._settings.max_new_tokens:
            limit = self._settings.max_new_tokens
            raise GenerationError(f"the answer has {tokens} tokens, the limit is {limit} (rollout.max_new_tokens)")
        return generation


async def write_demonstrations(
    config: Config, count: int, path: str | Path, progress: Callable[[int], None] = lambda done: None,
    name: str = "demonstrations",
) -> None:  # fmt: skip
    """Record `count` scripted episodes in the record file `path`, several at a time; `progress` gets each new total.

    Records successful episodes; where trainer.warm_start makes scripts submit too early or stall, every episode with a
    verdict.
    `name` identifies the process to servers and in log file names. Raises ConfigError for an environment without a
    scripted policy, ProcessError or BrowserError without a browser, RuntimeError if too many episodes fail.
    """
    check_scripted_policies(config)
    source, sessions = make_source(config.tasks), min(MAX_SESSIONS, count)
    try:
        async with open_browsers(config, sessions, name) as browsers:
            agent = Agent(browsers, Processor.load(config.model.path), Toolset.from_config(config.browser))
            recording = _Demonstrations(config, source, agent, count, progress)
            with RecordFileWriter(path) as file:
                await run_together(recording.work(file) for _ in range(sessions))
    finally:
        source.close()


def check_scripted_policies(config: Config) -> None:
    """Raise ConfigError for an environment without a scripted policy, or whose policy needs a disabled action."""
    for tasks in task_parts(config.tasks).values():
        _check_scripts(config, tasks)


def _check_scripts(config: Config, tasks: TasksConfig) -> None:
    setting = f"trainer.warm_start.demonstrations={config.trainer.warm_start.demonstrations}"
    if tasks.from_files and not tasks.offline_websites:
        raise ConfigError(
            f"{setting}, but tasks.source={tasks.source} has scripted policies on offline websites only; set "
            "demonstrations to 0, or tasks.offline_websites=true with files of them"
        )
    if not isinstance(tasks, PageTasksConfig):
        return  # whether a task has a script is known when it is opened
    known = scripted_environments(tasks.source)
    missing = [name for name in tasks.environments if name not in known]
    if missing:
        raise ConfigError(
            f"{setting}, but {', '.join(missing)} of tasks.environments has no scripted policy; leave it out, or set "
            f"demonstrations to 0 ({len(known)} environments of {tasks.source} have one: docs/tasks.md)"
        )
    for name in tasks.environments:
        needed = set(required_actions(tasks.source, name)) - set(config.browser.actions)
        if needed:
            raise ConfigError(
                f"{setting}, but the scripted policy of {name} needs {', '.join(sorted(needed))}; "
                "add it to browser.actions, leave the environment out, or set demonstrations to 0"
            )


class _Demonstrations:
    """Runs episodes until enough are recorded."""

    def __init__(
        self, config: Config, source: TaskSource | TaskMix, agent: Agent, count: int, progress: Callable[[int], None]
    ) -> None:
        self._config, self._source, self._agent, self._count, self._progress = config, source, agent, count, progress
        self._records_failures = config.trainer.warm_start.premature_submit_probability > 0
        self._started = self._recorded = self._failed = 0

    async def work(self, file: RecordFileWriter) -> None:
        """Record episodes; several tasks do at a time."""
        while self._started - self._failed < self._count:  # running and recorded ones never exceed the count
            ticket = FIRST_DEMONSTRATION_TICKET + self._started
            self._started += 1
            trajectory = await self._episode(ticket)
            if trajectory.outcome == "success" or (self._records_failures and trajectory.trainable):
                file.write(encode_trajectory(trajectory))
                self._recorded += 1
                self._progress(self._recorded)
                continue
            self._failed += 1
            failure = f"{trajectory.task.id}: {trajectory.outcome} after {len(trajectory.steps)} steps"
            log.info("a scripted episode failed: %s", failure)
            if self._failed > (limit := MAX_FAILURES + self._count // 10):
                raise RuntimeError(f"{self._failed} scripted episodes failed, more than {limit}; last: {failure}")

    async def _episode(self, ticket: int) -> Trajectory:
        config, agent = self._config, self._agent
        name = f"{config.run.seed}/{ticket}"
        probability = config.trainer.warm_start.premature_submit_probability
        generator = ScriptedGenerator(agent.processor, config.rollout, agent.toolset, probability, name)
        live = LiveRollout(self._source.training_task(config.run.seed, ticket), ticket=ticket)
        trajectory = await agent.run(generator, Episode(config.rollout, live))
        return with_verdict(trajectory, page_verdict(trajectory, config.judge.reward_threshold))
