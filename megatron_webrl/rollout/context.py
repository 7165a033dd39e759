"""The prompt of each step: a window of the latest rounds with their screenshots, and a summary of what came before.

system     tool and form of answers
user       task, start page, one line for each step before the window, oldest screenshot of the window
assistant  its answer, thinking left out
user       what came of it, next screenshot
...        up to the current screenshot, which is always last, its numbered elements before it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_webrl.config import ContextConfig
from megatron_webrl.model.processing import Processor
from megatron_webrl.rollout import prompts
from megatron_webrl.rollout.actions import CLOSE, OPEN, describe, without_thinking
from megatron_webrl.rollout.toolset import COORDINATES, Toolset
from megatron_webrl.types import Action, Observation

MAX_PAGE_TEXT = 200  # characters of a title, an error or a URL


class ContextOverflow(RuntimeError):
    """Not even the shortest prompt fits; the episode is masked."""

    outcome = "context_overflow"


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked."""

    messages: list[dict[str, Any]]
    token_ids: np.ndarray  # int32 [n], one placeholder per image
    images: np.ndarray  # int32 [images], indices of screenshots, in prompt order


@dataclass(frozen=True)
class _Round:
    """One step that is over. All text is neutralised."""

    image: int  # index of the screenshot that was answered
    response: str
    line: str  # of the summary
    effect: str
    title: str  # of the page after the step
    url: str


class Context:
    """The conversation of one episode. Screenshots are kept by index into `screenshots`, each once."""

    def __init__(
        self, processor: Processor, settings: ContextConfig, limit: int, toolset: Toolset = COORDINATES
    ) -> None:
        """`limit`: tokens that a prompt may have, image placeholders expanded."""
        self._processor, self._settings, self._limit, self._toolset = processor, settings, limit, toolset
        self.screenshots: list[bytes] = []
        self._grids: list[np.ndarray] = []  # of each screenshot, int32 [3]
        self._rounds: list[_Round] = []
        self._image = -1  # index of the current screenshot
        self._instruction = self._start_page = self._title = ""
        self._page = ""  # what is told of the current screenshot

    def begin(self, instruction: str, observation: Observation) -> None:
        """The task and its first observation."""
        self._instruction = self._processor.neutralise(instruction)
        self._title = self._short(observation.title)
        self._start_page = f"[{self._title}] {self._short(observation.url)}"
        self._see(observation)

    def add(self, response: str, action: Action | None, format_error: str | None, observation: Observation) -> None:
        """A step: the answer, the action in it or its format error, and what was seen then."""
        did = self._processor.neutralise(describe(action)) if action else "no valid tool call"
        effect = f"format error: {format_error}" if format_error else self._effect(observation)
        step = len(self._rounds) + 1
        line = (
            prompts.compact_history_line(step, did, effect)
            if self._settings.compact
            else prompts.history_line(step, self._title, did, effect)
        )
        image, self._title = self._image, self._short(observation.title)
        url = self._short(observation.url)
        self._rounds.append(_Round(image, self._quoted(response), line, effect, self._title, url))
        if action is not None:
            self._see(observation)

    def prompt(self) -> Prompt:
        """The prompt of the next step: as many rounds and summary lines as fit. Raises ContextOverflow."""
        window = min(self._settings.rounds - 1, len(self._rounds))
        for kept in range(window, -1, -1):
            found = self._fitting(kept, omitted=0)
            if found:
                return found
        return self._with_shortened_summary()

    def _with_shortened_summary(self) -> Prompt:
        """Only the current screenshot, and the most of the summary that fits: found by bisection."""
        low, high = 1, len(self._rounds)
        best = self._fitting(0, omitted=high)
        if best is None:
            raise ContextOverflow(
                f"the shortest prompt exceeds {self._limit} tokens (rollout.max_model_len - rollout.max_new_tokens)"
            )
        while low < high:
            middle = (low + high) // 2
            found = self._fitting(0, omitted=middle)
            if found:
                best, high = found, middle
            else:
                low = middle + 1
        return best

    def _fitting(self, kept: int, omitted: int) -> Prompt | None:
        messages, images = self._messages(kept, omitted)
        ids = self._processor.encode_chat(messages)
        grids = np.array([self._grids[index] for index in images], np.int32).reshape(-1, 3)
        if len(self._processor.expand(ids, grids)) > self._limit:
            return None
        return Prompt(messages, ids, np.array(images, np.int32))

    def _messages(self, kept: int, omitted: int) -> tuple[list[dict[str, Any]], list[int]]:
        """With the last `kept` rounds verbatim, the rest summarised but for the first `omitted`."""
        split = len(self._rounds) - kept
        summary = [past.line for past in self._rounds[omitted:split]]
        compact = self._settings.compact
        text = prompts.task_text(self._instruction, self._start_page, omitted, summary, compact)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": prompts.system_message(self._settings, self._toolset)}
        ]
        images = []
        for past in self._rounds[split:]:
            messages += [_user(text), {"role": "assistant", "content": past.response}]
            images.append(past.image)
            text = prompts.round_text(past.effect, past.title, past.url, compact)
        return [*messages, _user(text + self._page)], [*images, self._image]

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
        self._page = prompts.page_text(elements, tabs, scroll)

    def _effect(self, observation: Observation) -> str:
        effect = "page changed" if observation.page_changed else "page unchanged"
        return f"{effect}, {self._short(observation.error)}" if observation.error else effect

    def _quoted(self, response: str) -> str:
        """An earlier answer, its own tool-call tags kept, everything else neutralised: it may quote a page."""
        pieces = without_thinking(response).replace(CLOSE, OPEN).split(OPEN)
        if len(pieces) != 3:  # not one call: no tag of it is worth keeping
            return self._processor.neutralise(without_thinking(response))
        before, call, after = map(self._processor.neutralise, pieces)
        return f"{before}{OPEN}{call}{CLOSE}{after}"

    def _short(self, text: str) -> str:
        """Page text on one line, shortened, neutralised."""
        line = " ".join(text.split())
        return self._processor.neutralise(line if len(line) <= MAX_PAGE_TEXT else line[: MAX_PAGE_TEXT - 3] + "...")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]}
