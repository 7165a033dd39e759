"""Synthetic episodes whose truth is a function of their number, and the oracle that knows it."""

from __future__ import annotations

import io
import re
from functools import lru_cache

import numpy as np
from PIL import Image

from megatron_webrl.types import ANSWER, BLOCKED, STEPS_EXHAUSTED, Action, RubricFact, Step, Task, Trajectory

KINDS = ("success", "unsupported", "wrong_fact", "wrong_reference", "no_answer", "blocked", "success", "near_miss")
FACTS = 3
_TASK = re.compile(r"Task (\d+) of the benchmark")
_FACT = re.compile(r"Fact (\d+) of (\d+)")


def kind_of(number: int) -> str:
    """The kind of an episode, one of KINDS."""
    return KINDS[number % len(KINDS)]


def truth_of(number: int) -> str:
    """The right outcome of an episode."""
    kind = kind_of(number)
    return kind if kind in ("success", BLOCKED) else "failure"


class NumberOracle:
    """Knows the truth from the number in the task; refuses screenshots of another episode."""

    def decide(self, stage: str, fields: dict[str, str], images: list[bytes]) -> bool:
        """Raises ValueError for a question whose texts or screenshots are not of one episode."""
        match = _TASK.fullmatch(fields["TASK"])
        numbers = {_number(image) for image in images} | {int(match[1]) if match else -1}
        if len(numbers) != 1:
            raise ValueError(f"{stage}: a question about several episodes, {sorted(numbers)}")
        kind = kind_of(numbers.pop())
        if stage == "rubric":
            fact = _FACT.fullmatch(fields["FACT"])
            if not fact or not match or fact[2] != match[1]:
                raise ValueError(f"{stage}: the fact {fields['FACT']!r} is of another episode")
            failing = {"wrong_fact": "1", "near_miss": str(FACTS)}.get(kind)
            return fact[1] != failing
        wrong = {"supported": "unsupported", "reference": "wrong_reference"}.get(stage)
        return kind == BLOCKED if stage == "blocked" else kind != wrong


def make_episode(number: int, screenshots: int) -> Trajectory:
    """An unjudged episode with a step fewer than screenshots."""
    answer = None if kind_of(number) == "no_answer" else f"Answer {number}"
    last = Action("wait", time=1.0) if answer is None else Action("answer", text=answer)
    steps = tuple(
        make_step(
            place, last if place == screenshots - 2 else Action("left_click", (place % 1000, 500)), f"Page {place}",
            f"http://bench.localhost/{place}",
        )
        for place in range(screenshots - 1)
    )  # fmt: skip
    facts = tuple(RubricFact(str(n), "The facts of the task", f"Fact {n} of {number}") for n in range(1, FACTS + 1))
    task = Task(
        f"bench/{number}", "web", "page", number, screenshots, answer="The reference", facts=facts,
        url="http://bench.localhost/", website="bench.localhost",
    )  # fmt: skip
    return Trajectory(
        ticket=number, index=0, group_size=1, restart_epoch=0, task=task,
        instruction=f"Task {number} of the benchmark", steps=steps,
        images=tuple(_image(number, place) for place in range(screenshots)), reward=0.0, outcome="failure",
        temperature=1.0, seconds=0.0, end_reason=STEPS_EXHAUSTED if answer is None else ANSWER,
    )  # fmt: skip


def make_step(image: int, action: Action, title: str, url: str, page_changed: bool = False) -> Step:
    """A step at the page of screenshot number `image`, without tokens of a model."""
    tokens = np.zeros(1, np.int32)
    return Step(
        prompt_token_ids=tokens, response_token_ids=tokens, logprobs=np.zeros(1, np.float32), versions=tokens,
        images=np.array([image], np.int32), image_grids=np.ones((1, 3), np.int32), finish_reason="stop",
        action=action, url=url, title=title, page_changed=page_changed,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _image(number: int, place: int) -> bytes:
    """A small PNG whose first pixels hold the episode's number and the place."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[0, 0] = number >> 16 & 255, number >> 8 & 255, number & 255
    pixels[0, 1] = place
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _number(image: bytes) -> int:
    red, green, blue = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))[0, 0].tolist()
    return red << 16 | green << 8 | blue
