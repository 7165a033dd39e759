"""The conversation of one episode, and what all policies do alike: words, neutralising, the summary, the limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout import prompts
from megatron_webrl.rollout.actions import describe_action
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset
from megatron_webrl.types import Action, Observation

MAX_PAGE_FIELD_CHARS = 200  # characters of a title, an error or a URL


class ContextOverflow(RuntimeError):
    """Not even the shortest prompt fits; the episode is masked."""

    outcome = "context_overflow"


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked."""

    token_ids: np.ndarray  # int32 [n], one placeholder per image
    image_indices: np.ndarray  # int32 [images], indices of screenshots, in prompt order


@dataclass(frozen=True)
class PastStep:
    """One step that is over. All text but the answer's is neutralised."""

    image_index: int  # index of the screenshot that was answered
    generation: Generation
    summary_line: str  # of the summary
    result_text: str  # what stands before the screenshot that followed


class PromptContext(ABC):
    """The conversation of one episode. Screenshots are kept by index into `screenshots`, each once.

    Life: `begin`, then `prompt` and `add` in turns.
    """

    def __init__(
        self,
        processor: Processor,
        settings: ContextConfig,
        max_prompt_tokens: int,
        toolset: Toolset = COORDINATE_TOOLSET,
    ) -> None:
        """`limit`: tokens that a prompt may have, image placeholders expanded."""
        self._processor, self._settings, self._limit = processor, settings, max_prompt_tokens
        self._system = {"role": "system", "content": prompts.system_message(settings, toolset)}
        self.screenshots: list[bytes] = []
        self._grids: list[np.ndarray] = []  # of each screenshot, int32 [3]
        self._rounds: list[PastStep] = []
        self._image = -1  # index of the current screenshot
        self._instruction = self._start_page = self._title = ""
        self._page = ""  # what is told of the current screenshot

    def start_episode(self, instruction: str, observation: Observation) -> None:
        """The task and its first observation."""
        self._instruction = self._processor.escape_special_tokens(instruction)
        self._title = self._short(observation.title)
        self._start_page = f"[{self._title}] {self._short(observation.url)}"
        self._see(observation)

    def add_step(
        self, answer: Generation, action: Action | None, format_error: str | None, observation: Observation
    ) -> None:
        """A step: the answer to the last prompt, the action in it or its format error, and what was seen then."""
        did = self._processor.escape_special_tokens(describe_action(action)) if action else "no valid tool call"
        effect = f"format error: {format_error}" if format_error else self._effect(observation)
        step, compact = len(self._rounds) + 1, self._settings.compact
        line = (
            prompts.compact_history_line(step, did, effect)
            if compact
            else prompts.history_line(step, self._title, did, effect)
        )
        self._title = self._short(observation.title)
        result = prompts.step_result_text(effect, self._title, self._short(observation.url), compact)
        self._rounds.append(PastStep(self._image, answer, line, result))
        if action is not None:
            self._see(observation)

    @abstractmethod
    def build_prompt(self) -> Prompt:
        """The prompt of the next step, the current screenshot last in it. Raises ContextOverflow."""

    def _opening(self, rounds: int, omitted: int) -> str:
        """Task, start page and the summary of the first `rounds` rounds, of which `omitted` are only counted."""
        lines = [past.summary_line for past in self._rounds[omitted:rounds]]
        return prompts.task_text(self._instruction, self._start_page, omitted, lines, self._settings.compact)

    def _fresh(self, messages: Sequence[dict[str, Any]], images: Sequence[int]) -> Prompt | None:
        """A prompt of these messages after the system's, or None if it exceeds the limit."""
        return self._within(self._processor.encode_chat([self._system, *messages]), images)

    def _within(self, token_ids: np.ndarray, images: Sequence[int]) -> Prompt | None:
        grids = np.array([self._grids[index] for index in images], np.int32).reshape(-1, 3)
        if len(self._processor.expand_image_tokens(token_ids, grids)) > self._limit:
            return None
        return Prompt(token_ids, np.array(images, np.int32))

    def _summarised(self) -> Prompt:
        """Only the current screenshot, and the most of the summary that fits: found by bisection."""
        if whole := self._alone(0):
            return whole
        low, high = 1, len(self._rounds)
        best = self._alone(high)
        if best is None:
            raise ContextOverflow(
                f"the shortest prompt exceeds {self._limit} tokens (rollout.max_model_len - rollout.max_new_tokens)"
            )
        while low < high:
            middle = (low + high) // 2
            found = self._alone(middle)
            if found:
                best, high = found, middle
            else:
                low = middle + 1
        return best

    def _alone(self, omitted: int) -> Prompt | None:
        text = self._opening(len(self._rounds), omitted)
        return self._fresh([user_message(text + self._page)], [self._image])

    def _see(self, observation: Observation) -> None:
        self.screenshots.append(observation.screenshot)
        self._grids.append(self._processor.grids([observation.screenshot])[0])
        self._image = len(self.screenshots) - 1
        short = self._short
        elements = [
            replace(
                element, role=short(element.role), name=short(element.name), value=short(element.value),
                options=tuple(map(short, element.options)),
            )
            for element in observation.elements or ()
        ]  # fmt: skip
        tabs = [replace(tab, title=short(tab.title), url=short(tab.url)) for tab in observation.tabs]
        scroll = observation.scroll if self._settings.scroll_position else None
        self._page = prompts.page_state_text(elements, tabs, scroll)

    def _effect(self, observation: Observation) -> str:
        effect = "page changed" if observation.page_changed else "page unchanged"
        return f"{effect}, {self._short(observation.error)}" if observation.error else effect

    def _short(self, text: str) -> str:
        """Page text on one line, shortened, neutralised."""
        line = " ".join(text.split())
        return self._processor.escape_special_tokens(
            line if len(line) <= MAX_PAGE_FIELD_CHARS else line[: MAX_PAGE_FIELD_CHARS - 3] + "..."
        )


def user_message(text: str) -> dict[str, Any]:
    """A turn of the user: words, then the screenshot."""
    return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]}
