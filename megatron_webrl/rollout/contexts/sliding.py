"""Sliding: the latest steps with their screenshots, and a summary of the earlier steps.

system     tool and response format
user       task, start page, one line for each step before the window, oldest screenshot of the window
assistant  its response, without thinking
user       result of the step, next screenshot
...        up to the current screenshot, which comes last, after its numbered elements
"""

from __future__ import annotations

from typing import Any

from megatron_webrl.rollout.actions import TOOL_CALL_CLOSE, TOOL_CALL_OPEN, strip_thinking
from megatron_webrl.rollout.contexts.base import Prompt, PromptContext, user_message


class SlidingContext(PromptContext):
    """Renders each prompt from scratch, with the last `rounds` screenshots."""

    def build_prompt(self) -> Prompt:
        """A prompt with as many steps and summary lines as fit. Raises ContextOverflow."""
        for kept in range(min(self._settings.rounds - 1, len(self._past)), 0, -1):
            if prompt := self._with_steps(kept):
                return prompt
        return self._summarised()

    def _with_steps(self, kept: int) -> Prompt | None:
        """A prompt with the last `kept` steps verbatim and all others summarised; None if it is too long."""
        split = len(self._past) - kept
        text, messages, images = self._task_text(split, 0), list[dict[str, Any]](), list[int]()
        for past in self._past[split:]:
            messages += [user_message(text), {"role": "assistant", "content": self._quoted(past.generation.text)}]
            images.append(past.image_index)
            text = past.result_text
        return self._render([*messages, user_message(text + self._page)], [*images, self._image])

    def _quoted(self, response: str) -> str:
        """An earlier response, escaped except for its tool-call tags, because it may quote a page."""
        pieces = strip_thinking(response).replace(TOOL_CALL_CLOSE, TOOL_CALL_OPEN).split(TOOL_CALL_OPEN)
        if len(pieces) != 3:  # not exactly one call: escape the tags, too
            return self._processor.escape_special_tokens(strip_thinking(response))
        before, call, after = map(self._processor.escape_special_tokens, pieces)
        return f"{before}{TOOL_CALL_OPEN}{call}{TOOL_CALL_CLOSE}{after}"
