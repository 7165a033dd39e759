"""Append: each prompt is the one before, the answer to it, and a new turn, token for token, until the window is full.

system     tool and form of answers
user       task, start page, one line for each step before the stretch, its first screenshot
assistant  the answer as it was produced, thinking included
user       what came of it, numbered elements, next screenshot
...        up to the current screenshot

Then the whole stretch becomes lines of the summary, and a new one begins with the current screenshot. So the engine
finds the prompt in its prefix cache but for the new turn, and the trainer computes a stretch as one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_webrl.rollout.contexts.base import Prompt, PromptContext, user_message
from megatron_webrl.rollout.prompts import MAX_ELEMENT_LIST_CHARS


@dataclass(frozen=True)
class _Asked:
    """The latest prompt."""

    prompt: Prompt
    rounds: int  # that were over when it was made
    page_text: int  # characters that its stretch tells of pages: elements, tabs, positions


class AppendContext(PromptContext):
    """A stretch has at most `rounds` screenshots.

    It ends earlier where the next turn would exceed the token limit, where what it tells of pages would exceed
    prompts.MAX_LIST_TEXT characters, or after an answer with special tokens, which no prompt can hold: an engine would
    take them for images or turns.
    """

    _asked: _Asked | None = None

    def build_prompt(self) -> Prompt:
        """The latest prompt, its answer and the new turn, or the first prompt of a stretch. Raises ContextOverflow."""
        if self._asked is None or self._asked.rounds != len(self._rounds):
            self._asked = self._continued() or _Asked(self._summarised(), len(self._rounds), len(self._page))
        return self._asked.prompt

    def _continued(self) -> _Asked | None:
        """None where the stretch is at its end."""
        before = self._asked
        if before is None or len(self._rounds) - before.rounds != 1:  # an answer to something else
            return None
        page_text = before.page_text + len(self._page)
        answer = self._rounds[-1].generation.response_token_ids
        if (
            len(before.prompt.image_indices) == self._settings.rounds
            or page_text > MAX_ELEMENT_LIST_CHARS
            or self._processor.has_special_tokens(answer)
        ):
            return None
        turn = self._processor.encode_turn(user_message(self._rounds[-1].result_text + self._page))
        end = [] if answer[-1] == self._processor.eos_token_id else [self._processor.eos_token_id]
        ids = np.concatenate([before.prompt.token_ids, answer, end, turn]).astype(np.int32)
        prompt = self._within(ids, [*before.prompt.image_indices, self._image])
        return _Asked(prompt, len(self._rounds), page_text) if prompt else None
