"""Sliding: the latest steps with their screenshots, and a summary of the earlier steps.

system     tool and response format
user       task, start page, one line for each step before the window, latest Memory if a step before the window wrote
           it, oldest screenshot of the window
assistant  its response, without thinking unless rollout.context.keep_thinking
user       result of the step, next screenshot
...        up to the current screenshot, which comes last, after its numbered elements
"""

from __future__ import annotations

from typing import Any

from megatron_webrl.rollout.contexts.base import Prompt, PromptContext
from megatron_webrl.rollout.responses import (
    THOUGHT_CLOSE,
    THOUGHT_OPEN,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
    split_calls,
    split_thinking,
)


class SlidingContext(PromptContext):
    """Renders each prompt from scratch, with the last `history_turns` screenshots."""

    def build_prompt(self) -> Prompt:
        """A prompt with as many steps and summary lines as fit. Raises ContextOverflow."""
        for kept in range(min(self._settings.history_turns - 1, len(self._past)), 0, -1):
            if prompt := self._with_steps(kept):
                return prompt
        return self._summarised()

    def _with_steps(self, kept: int) -> Prompt | None:
        """A prompt with the last `kept` steps verbatim and all others summarised; None if it is too long."""
        split = len(self._past) - kept
        text, messages, images = self._task_text(split, 0), list[dict[str, Any]](), list[int]()
        for past in self._past[split:]:
            messages += [self._user_message(text), {"role": "assistant", "content": self._quoted(past.generation.text)}]
            images.append(past.image_index)
            text = past.result_text
        return self._render([*messages, self._user_message(text + self._page)], [*images, self._image])

    def _quoted(self, response: str) -> str:
        """An earlier response, escaped except for its tags of thoughts and of the call, because it may quote a page."""
        thoughts, answer = split_thinking(response)
        escape = self._processor.escape_special_tokens
        pieces = split_calls(answer)
        if pieces[1::2] == [TOOL_CALL_OPEN, TOOL_CALL_CLOSE]:
            pieces[::2] = map(escape, pieces[::2])
            answer = "".join(pieces)
        else:  # not exactly one call: escape the tags, too
            answer = escape(answer)
        if not self._settings.keep_thinking or not thoughts:
            return answer
        return f"{THOUGHT_OPEN}\n{escape(thoughts)}\n{THOUGHT_CLOSE}\n\n{answer}"
