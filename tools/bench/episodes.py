"""Web-agent episodes for benchmarks, generated from a seed: the rollout's prompts around drawn pages.

An episode has one to ten steps. The rollout's context makes each prompt: a window of up to four screenshots with their
responses, older steps as one line each. As in training, neighbouring steps share screenshots and, until the window is
full, the whole prefix of the prompt. Only the responses are invented. The trajectories of a group have their task and
first page in common; from the first response on they differ.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import make_context
from megatron_webrl.rollout.demonstrations import scripted_generation
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.rollout.toolset import format_tool_call
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.types import Action, Observation
from tools.bench.screenshots import draw_page, random_words

STEPS = (1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, 10)
"""Steps of an episode are drawn from these: most tasks are short, a few take long."""
THOUGHT_WORDS = (4, 40)
"""Least and most words of the thought in a response; short ones are more frequent."""


@dataclass(frozen=True)
class EpisodeShape:
    """What episodes are made with."""

    context: ContextConfig
    window: int  # largest number of tokens of a sample
    steps: Sequence[int] = STEPS
    width: int = 480  # pixels of a screenshot
    height: int = 320
    thought_words: tuple[int, int] = THOUGHT_WORDS


def make_episodes(
    processor: Processor, count: int, window: int, seed: int, group_size: int = 1
) -> list[list[TrainingSample]]:
    """The steps of `count` groups of episodes as training samples of at most `window` tokens."""
    shape = EpisodeShape(ContextConfig(history_turns=4, response_format="vanilla", compact=True), window)
    return [each for number in range(count) for each in make_group(processor, number, shape, seed, group_size)]


def make_group(
    processor: Processor, number: int, shape: EpisodeShape, seed: int, size: int
) -> list[list[TrainingSample]]:
    """The steps of `size` episodes of one task."""
    common = random.Random(f"{seed}/{number}")
    steps = common.choice(shape.steps)
    instruction = random_words(common, common.randint(5, 25))
    first = _observation(common, shape)
    rngs = [common, *(random.Random(f"{seed}/{number}/{index}") for index in range(1, size))]
    return [
        _episode(processor, (number, index), shape, steps, instruction, first, rng) for index, rng in enumerate(rngs)
    ]


def _episode(
    processor: Processor,
    trajectory: tuple[int, int],
    shape: EpisodeShape,
    steps: int,
    instruction: str,
    first: Observation,
    rng: random.Random,
) -> list[TrainingSample]:
    context = make_context(processor, shape.context, shape.window - 256)
    context.start_episode(instruction, first)
    made = []
    for step in range(steps):
        prompt = context.build_prompt()
        images = tuple(context.screenshots[i] for i in prompt.image_indices)
        action, response = _answer(rng, shape.thought_words)
        answer = scripted_generation(processor, prompt.token_ids, images, response)
        made.append(make_sample(answer, images, steps, trajectory))
        if step + 1 < steps:
            context.add_step(answer, action, None, _observation(rng, shape))
    return made


def _observation(rng: random.Random, shape: EpisodeShape) -> Observation:
    return Observation(
        screenshot=draw_page(rng.randrange(2**31), shape.width, shape.height),
        url=f"http://site.example/{random_words(rng, 1)}/{rng.randrange(1000)}",
        title=random_words(rng, rng.randint(1, 6)),
        page_changed=True,
    )


def _answer(rng: random.Random, thought_words: tuple[int, int]) -> tuple[Action, str]:
    action = Action("left_click", (rng.randrange(0, 1000, 20), rng.randrange(0, 1000, 20)))
    if rng.random() < 0.2:
        action = Action("type", text=random_words(rng, rng.randint(1, 6)))
    low, high = thought_words
    thought = random_words(rng, round(low + (high - low) * rng.random() ** 2))
    return action, f"Thought: {thought}.\nAction: {action.kind}\n{format_tool_call(action)}"


def make_sample(answer: Generation, images: Sequence[bytes], steps: int, trajectory: tuple[int, int]) -> TrainingSample:
    """A step as a training sample. `images`: encoded images of the prompt; `steps`: number in the trajectory."""
    return TrainingSample(
        prompt=answer.prompt_token_ids,
        response=answer.response_token_ids,
        behaviour_logprobs=answer.logprobs,
        versions=answer.versions,
        images=tuple(images),
        grids=answer.image_grids,
        temperature=1.0,
        advantage=1.0,
        trajectory_steps=steps,
        trajectory_id=trajectory,
    )
