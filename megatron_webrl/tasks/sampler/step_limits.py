"""Step limits of episodes, which may differ by difficulty, and grow with the policy version in training."""

from __future__ import annotations

from megatron_webrl.config.tasks import GrowingStepsConfig, TasksConfig


def growing_limit(settings: GrowingStepsConfig, version: int | None) -> int | None:
    """The step limit of a ticket admitted at a policy version; None if the limit does not grow (interval 0).

    `version` None: of an episode that no policy version makes, such as a demonstration; it has the last limit.
    """
    if not settings.interval:
        return None
    increases = settings.cap_step // settings.interval
    done = increases if version is None else min(version // settings.interval, increases)
    return settings.initial + int(done * (settings.max - settings.initial) / increases)


def training_limit(tasks: TasksConfig, difficulty: str, version: int | None) -> int:
    """The step limit of a training task: that of its difficulty, else the common one, which a growing limit replaces.

    Of a growing limit and that of the difficulty the smaller one holds. `version` as in `growing_limit`.
    """
    current = growing_limit(tasks.growing_steps, version)
    limit = tasks.max_steps_by_difficulty.get(difficulty, tasks.max_steps if current is None else current)
    return limit if current is None else min(current, limit)


def evaluation_limit(tasks: TasksConfig, difficulty: str) -> int:
    """The step limit of an evaluation task; where the settings give none, the last one of training."""
    return tasks.evaluation_max_steps_by_difficulty.get(difficulty, training_limit(tasks, difficulty, None))
