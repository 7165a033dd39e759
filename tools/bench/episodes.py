"""Web-agent episodes for benchmarks, generated from a seed: the rollout's prompts around drawn pages.

An episode has one to ten steps. The rollout's context makes each prompt: a window of up to four screenshots with their
responses, older steps as one line each. As in training, neighbouring steps share screenshots and, until the window is
full, the whole prefix of the prompt. Only the responses are invented.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.parity.page_images import draw_page, random_words
from megatron_webrl.rollout.actions import format_tool_call
from megatron_webrl.rollout.contexts.sliding import SlidingContext
from megatron_webrl.rollout.demonstrations import scripted_generation
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.types import Action, Observation

STEPS = (1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, 10)
"""Steps of an episode are drawn from these: most tasks are short, a few take long."""
THOUGHT_WORDS = (4, 40)
"""Least and most words of the thought in a response; short ones are more frequent."""
WIDTH, HEIGHT = 480, 320  # pixels of a screenshot


def make_episodes(processor: Processor, count: int, window: int, seed: int) -> list[list[TrainingSample]]:
    """The steps of `count` episodes as training samples of at most `window` tokens."""
    return [_episode(processor, number, window, random.Random(f"{seed}/{number}")) for number in range(count)]


def _episode(processor: Processor, number: int, window: int, rng: random.Random) -> list[TrainingSample]:
    steps = rng.choice(STEPS)
    context = SlidingContext(processor, ContextConfig(rounds=4, response_format="vanilla", compact=True), window - 256)
    context.start_episode(random_words(rng, rng.randint(5, 25)), _observation(rng))
    made = []
    for step in range(steps):
        prompt = context.build_prompt()
        images = tuple(context.screenshots[i] for i in prompt.image_indices)
        action, response = _answer(rng)
        answer = scripted_generation(processor, prompt.token_ids, images, response)
        made.append(make_sample(answer, images, steps, (number, 0)))
        if step + 1 < steps:
            context.add_step(answer, action, None, _observation(rng))
    return made


def _observation(rng: random.Random) -> Observation:
    return Observation(
        screenshot=draw_page(rng.randrange(2**31), WIDTH, HEIGHT),
        url=f"http://site.example/{random_words(rng, 1)}/{rng.randrange(1000)}",
        title=random_words(rng, rng.randint(1, 6)),
        page_changed=True,
    )


def _answer(rng: random.Random) -> tuple[Action, str]:
    action = Action("left_click", (rng.randrange(0, 1000, 20), rng.randrange(0, 1000, 20)))
    if rng.random() < 0.2:
        action = Action("type", text=random_words(rng, rng.randint(1, 6)))
    low, high = THOUGHT_WORDS
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
