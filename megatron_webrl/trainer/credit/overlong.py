"""Overlong filter: failures that a limit made."""

from __future__ import annotations

from megatron_webrl.judge.outcome import STEPS_EXHAUSTED
from megatron_webrl.types import Trajectory


def is_overlong(trajectory: Trajectory) -> bool:
    """Whether a failure ended by the step limit, or has a response cut at rollout.max_new_tokens.

    DAPO masks the loss of such samples, since their reward says little of what they did (arXiv 2503.14476, section
    3.4). A success is never overlong: no limit kept it from its reward.
    """
    if trajectory.outcome != "failure":
        return False
    return trajectory.end_reason == STEPS_EXHAUSTED or any(step.finish_reason == "length" for step in trajectory.steps)
