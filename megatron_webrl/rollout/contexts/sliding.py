"""Sliding: the latest rounds with their screenshots, and a summary of what came before.

system     tool and form of answers
user       task, start page, one line for each step before the window, oldest screenshot of the window
assistant  its answer, thinking left out
user       what came of it, next screenshot
...        up to the current screenshot, which is always last, its numbered elements before it
"""

from __future__ import annotations

from typing import Any

from megatron_webrl.rollout.actions import TOOL_CALL_CLOSE, TOOL_CALL_OPEN, strip_thinking
from megatron_webrl.rollout.contexts.base import Prompt, PromptContext, user_message


class SlidingContext(PromptContext):
    """Every prompt is rendered anew, with the last `rounds` screenshots."""

    def build_prompt(self) -> Prompt:
        """As many rounds and summary lines as fit. Raises ContextOverflow."""
        for kept in range(min(self._settings.rounds - 1, len(self._rounds)), 0, -1):
            found = self._with_rounds(kept)
            if found:
                return found
        return self._summarised()

    def _with_rounds(self, kept: int) -> Prompt | None:
        """The last `kept` rounds verbatim, all others summarised; None if that is too long."""
        split = len(self._rounds) - kept
        text, messages, images = self._opening(split, 0), list[dict[str, Any]](), list[int]()
        for past in self._rounds[split:]:
            messages += [user_message(text), {"role": "assistant", "content": self._quoted(past.generation.text)}]
            images.append(past.image_index)
            text = past.result_text
        return self._fresh([*messages, user_message(text + self._page)], [*images, self._image])

    def _quoted(self, answer: str) -> str:
        """An earlier answer, its own tool-call tags kept, everything else neutralised: it may quote a page."""
        pieces = strip_thinking(answer).replace(TOOL_CALL_CLOSE, TOOL_CALL_OPEN).split(TOOL_CALL_OPEN)
        if len(pieces) != 3:  # not one call: no tag of it is worth keeping
            return self._processor.escape_special_tokens(strip_thinking(answer))
        before, call, after = map(self._processor.escape_special_tokens, pieces)
        return f"{before}{TOOL_CALL_OPEN}{call}{TOOL_CALL_CLOSE}{after}"
