"""The environment's own reward, or its reference answer, as the verdict on an episode."""

from __future__ import annotations

import math
import re
import unicodedata
from decimal import Decimal

from megatron_webrl.types import TRAINABLE_OUTCOMES

DONE, ANSWER, STEPS_EXHAUSTED = "done", "answer", "steps_exhausted"
"""How an episode ends by rule: the page ended it, the agent answered, or it used its last step."""


_NUMBER = re.compile(r"[$€£]? ?(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?)")


def outcome(reward: float | None, end_reason: str, reference: str | None = None, answer: str | None = None) -> str:
    """ "success" or "failure" of an episode that ended by rule; otherwise what masks it.

    `reward` is the page's, None while there is none; `ended` is how the episode came to its end: DONE, ANSWER,
    STEPS_EXHAUSTED, or the name of what broke it off (browser_error, engine_error, episode_timeout,
    context_overflow, ...), which is returned. Fails closed: a page that ends an episode without a reward, or
    with one that is not a number, masks it. A task with a `reference` succeeds only by an `answer` that agrees with
    it on a page that gave no reward: what a page rewards of itself is a wrong action there. Raises ValueError if
    `ended` is itself a verdict or empty.
    """
    if not end_reason or end_reason in TRAINABLE_OUTCOMES:
        raise ValueError(f"end_reason={end_reason!r} does not say how the episode ended")
    if end_reason not in (DONE, ANSWER, STEPS_EXHAUSTED):
        return end_reason
    if reward is None and end_reason == ANSWER and reference is not None:
        return "success" if answer is not None and answers_match(answer, reference) else "failure"
    if reward is None:
        return "no_reward" if end_reason == DONE else "failure"
    if not math.isfinite(reward):
        return "bad_reward"
    return "success" if reward > 0 and reference is None else "failure"


def answers_match(answer: str, reference: str) -> bool:
    """Whether two texts are the same number, or the same words but for case, spaces, quotes and a final full stop."""
    given, wanted = _plain(answer), _plain(reference)
    if given == wanted:
        return bool(wanted)
    numbers = [_NUMBER.fullmatch(text) for text in (given, wanted)]
    values = [Decimal(found[1].replace(",", "")) for found in numbers if found]
    return len(values) == 2 and values[0] == values[1]


def _plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.removesuffix(".").strip("\"'` \u2018\u2019\u201c\u201d")
