"""Append: each prompt is the previous prompt, its response and a new turn, token for token, until the window is full.

system     tool and response format
user       task, start page, one line for each step before the segment, latest Memory, the segment's first screenshot
assistant  the response as it was generated, thinking included
user       result of the step, numbered elements, next screenshot
...        up to the current screenshot

Then the whole segment becomes lines of the summary, and a new segment begins with the current screenshot. So the
engine's prefix cache covers each prompt except for its new turn, and the trainer computes a segment as one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_webrl.rollout.contexts.base import Prompt, PromptContext
from megatron_webrl.rollout.prompts import MAX_ELEMENT_LIST_CHARS


@dataclass(frozen=True)
class _Latest:
    """The latest prompt."""

    prompt: Prompt
    steps: int  # completed before it
    page_chars: int  # characters of page text in its segment: elements, tabs, scroll positions


class AppendContext(PromptContext):
    """A segment has at most `history_turns` screenshots.

    It ends earlier if the next turn would exceed the token limit or MAX_ELEMENT_LIST_CHARS of page text, or after a
    response with special tokens: in a prompt the engine would treat them as images or ends of turns.
    """

    _latest: _Latest | None = None

    def build_prompt(self) -> Prompt:
        """The previous prompt, its response and a new turn, or a segment's first prompt. Raises ContextOverflow."""
        if self._latest is None or self._latest.steps != len(self._past):
            self._latest = self._extended() or _Latest(self._summarised(), len(self._past), len(self._page))
        return self._latest.prompt

    def _extended(self) -> _Latest | None:
        """The latest prompt plus one step; None if the segment ends."""
        latest = self._latest
        if latest is None or len(self._past) - latest.steps != 1:  # the last response is to another prompt
            return None
        page_chars = latest.page_chars + len(self._page)
        response = self._past[-1].generation.response_token_ids
        if (
            len(latest.prompt.image_indices) == self._settings.history_turns
            or page_chars > MAX_ELEMENT_LIST_CHARS
            or self._processor.has_special_tokens(response)
        ):
            return None
        turn = self._processor.encode_turn(self._user_message(self._past[-1].result_text + self._page))
        end = [] if response[-1] == self._processor.eos_token_id else [self._processor.eos_token_id]
        ids = np.concatenate([latest.prompt.token_ids, response, end, turn]).astype(np.int32)
        prompt = self._limited(ids, [*latest.prompt.image_indices, self._image])
        return _Latest(prompt, len(self._past), page_chars) if prompt else None
