"""How episodes end, and the outcome by the page's reward or by the task's reference answer."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import replace
from decimal import Decimal

from megatron_webrl.types import TRAINABLE_OUTCOMES, Trajectory, Verdict

DONE, ANSWER = "done", "answer"  # ends by the page, by the agent
STEPS_EXHAUSTED, GO_BACKS = "steps_exhausted", "go_backs"  # by the last step, by going back from the start page
REGULAR_ENDS = (DONE, ANSWER, STEPS_EXHAUSTED, GO_BACKS)

_NUMBER = re.compile(r"([$€£]?) ?(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?)")


def outcome(
    reward: float | None,
    end_reason: str,
    reference: str | None = None,
    answer: str | None = None,
    reward_threshold: float = 0.0,
) -> str:
    """Return "success" or "failure" for a regular end of the episode, otherwise the reason that masks it.

    `reward` is the page's, None if it gave none; a success has at least `reward_threshold`, and more than 0.
    `end_reason` is one of REGULAR_ENDS, or the name of a fault (browser_error, engine_error, episode_timeout,
    context_overflow, ...), which is returned. Fails closed: a page that ends an episode without a reward, or with a
    reward that is not finite, masks it. A task with a `reference` succeeds only by a matching `answer` on a page that
    gave no reward: there a reward of the page itself marks a wrong action. Raises ValueError if `end_reason` is empty
    or itself a verdict.
    """
    if not end_reason or end_reason in TRAINABLE_OUTCOMES:
        raise ValueError(f"end_reason={end_reason!r} does not say how the episode ended")
    if end_reason not in REGULAR_ENDS:
        return end_reason
    if reward is None and end_reason == ANSWER and reference is not None:
        return "success" if answer is not None and answers_match(answer, reference) else "failure"
    if reward is None:
        return "no_reward" if end_reason == DONE else "failure"
    if not math.isfinite(reward):
        return "bad_reward"
    return "success" if reward > 0 and reward >= reward_threshold and reference is None else "failure"


def page_verdict(trajectory: Trajectory, reward_threshold: float = 0.0) -> Verdict:
    """The verdict of an episode by the page's reward, else by the task's answer."""
    task = trajectory.task
    decided = outcome(trajectory.page_reward, trajectory.end_reason, task.answer, trajectory.answer, reward_threshold)
    reward = "none" if trajectory.page_reward is None else f"{trajectory.page_reward:g}"
    return Verdict(decided, "page", reason=f"end: {trajectory.end_reason}; reward of the page: {reward}")


def with_verdict(trajectory: Trajectory, verdict: Verdict) -> Trajectory:
    """The trajectory with the outcome and the reward of a verdict."""
    reward = float(verdict.outcome == "success")
    return replace(trajectory, outcome=verdict.outcome, reward=reward, verdict=verdict)


def answers_match(answer: str, reference: str) -> bool:
    """Whether two texts are equal as numbers, or as text up to case, spaces, quotes and a final full stop.

    A number with a currency sign equals one without, but not one with another sign.
    """
    actual, expected = _plain(answer), _plain(reference)
    if actual == expected:
        return bool(expected)
    numbers = [_NUMBER.fullmatch(text) for text in (actual, expected)]
    values = [Decimal(number[2].replace(",", "")) for number in numbers if number]
    signs = {number[1] for number in numbers if number} - {""}
    return len(values) == 2 and values[0] == values[1] and len(signs) < 2


def _plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.removesuffix(".").strip("\"'` \u2018\u2019\u201c\u201d")
