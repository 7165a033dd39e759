"""Step limits of training, which may grow with the policy version."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_webrl.config.tasks import GrowingStepsConfig


def growing_limit(settings: GrowingStepsConfig, version: int | None) -> int | None:
    """The step limit of a ticket admitted at a policy version; None if the limit does not grow (interval 0).

    `version` None: of an episode that no policy version makes, such as a demonstration; it has the last limit.
    """
    if not settings.interval:
        return None
    increases = settings.cap_step // settings.interval
    done = increases if version is None else min(version // settings.interval, increases)
    return settings.initial + int(done * (settings.max - settings.initial) / increases)


def training_limit(
    max_steps: int, by_difficulty: Mapping[str, int], growing: GrowingStepsConfig, difficulty: str, version: int | None
) -> int:
    """The step limit of a training task: that of its difficulty, else the common one, which a growing limit replaces.

    Of a growing limit and that of the difficulty the smaller one holds. `version` as in `growing_limit`.
    """
    current = growing_limit(growing, version)
    limit = by_difficulty.get(difficulty)
    if current is None:
        return max_steps if limit is None else limit
    return current if limit is None else min(current, limit)
