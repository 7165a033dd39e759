"""What a judge sees of an episode: screenshots, pages, actions, answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_webrl.types import Action, Trajectory
from megatron_webrl.util.image_type import data_url


@dataclass(frozen=True)
class Screenshot:
    """One screenshot of an episode."""

    number: int  # from 1, in the order of the episode
    image: bytes  # encoded: PNG, JPEG or WebP

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.image).hexdigest()

    @cached_property
    def data_url(self) -> str:
        return data_url(self.image)


@dataclass(frozen=True)
class EpisodeView:
    """The material of a verdict. All texts but none of the structure may be written by pages or by the agent."""

    task: str
    answer: str | None  # None: the episode ended without one
    reference: str | None
    facts: tuple[tuple[str, str], ...]  # description of the fact's group, fact
    actions: str  # one line a step
    pages: str  # one line a screenshot
    screenshots: tuple[Screenshot, ...]  # without repetitions of the one before

    @classmethod
    def of(cls, trajectory: Trajectory) -> EpisodeView:
        """The view of an episode. An answer of white space only is none."""
        answer = trajectory.answer if trajectory.answer and trajectory.answer.strip() else None
        return cls(
            task=trajectory.instruction,
            answer=answer,
            reference=trajectory.task.answer,
            facts=tuple((fact.description, fact.fact) for fact in trajectory.task.facts),
            actions=_actions(trajectory),
            pages=_pages(trajectory),
            screenshots=_distinct([bytes(image) for image in trajectory.images]),
        )

    def evenly_sampled(self, count: int) -> tuple[Screenshot, ...]:
        """At most `count` screenshots, first and last among them if `count` allows."""
        shots = self.screenshots
        if len(shots) <= count:
            return shots
        if count == 1:
            return shots[-1:]
        return tuple(shots[round(place * (len(shots) - 1) / (count - 1))] for place in range(count))


def _distinct(images: Sequence[bytes]) -> tuple[Screenshot, ...]:
    """The last of each series of equal screenshots, so that the final one always counts as the last."""
    numbered = list(enumerate(images, 1))
    return tuple(
        Screenshot(number, image)
        for number, image in numbered
        if number == len(numbered) or numbered[number][1] != image
    )


def _actions(trajectory: Trajectory) -> str:
    lines = []
    for number, step in enumerate(trajectory.steps, 1):
        if step.action is None:
            lines.append(f"{number}. no valid action")
            continue
        effect = "page changed" if step.page_changed else "page unchanged"
        lines.append(f"{number}. {_action_text(step.action)}; {effect}")
    return "\n".join(lines)


def _action_text(action: Action) -> str:
    """All arguments of an action in full, each on the same line: `type text="abc" element_id=5`."""
    terms: list[str] = [action.kind]
    for name in ("text", "url", "direction", "time", "tab", "element_id", "coordinate", "end_element_id",
                 "end_coordinate"):  # fmt: skip
        value = getattr(action, name)
        if value is not None:
            terms.append(f"{name}={json.dumps(value, ensure_ascii=False)}")
    return " ".join(terms)


def _pages(trajectory: Trajectory) -> str:
    """Title and URL of each screenshot that a step acted on."""
    pages: dict[int, str] = {}
    for step in trajectory.steps:
        if len(step.images) and (step.title or step.url):
            pages[int(step.images[-1]) + 1] = f"{' '.join(step.title.split())} | {step.url}"
    return "\n".join(f"screenshot {number}: {page}" for number, page in sorted(pages.items()))
