"""The environment's own reward as the verdict on an episode."""

from __future__ import annotations

import math

from megatron_webrl.types import TRAINABLE_OUTCOMES

DONE, ANSWER, STEPS_EXHAUSTED = "done", "answer", "steps_exhausted"
"""How an episode ends by rule: the page ended it, the agent answered, or it used its last step."""


def outcome(reward: float | None, ended: str) -> str:
    """ "success" or "failure" of an episode that ended by rule; otherwise what masks it.

    `reward` is the page's, None while there is none; `ended` is how the episode came to its end: DONE, ANSWER,
    STEPS_EXHAUSTED, or the name of what broke it off (browser_error, engine_error, episode_timeout,
    context_overflow, ...), which is returned. Fails closed: a page that ends an episode without a reward, or
    with one that is not a number, masks it. Raises ValueError if `ended` is itself a verdict or empty.
    """
    if not ended or ended in TRAINABLE_OUTCOMES:
        raise ValueError(f"ended={ended!r} does not say how the episode ended")
    if ended not in (DONE, ANSWER, STEPS_EXHAUSTED):
        return ended
    if reward is None:
        return "no_reward" if ended == DONE else "failure"
    if not math.isfinite(reward):
        return "bad_reward"
    return "success" if reward > 0 else "failure"
