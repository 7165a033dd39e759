"""Step limits that grow with the policy version."""

from __future__ import annotations

from megatron_webrl.config.tasks import GrowingStepsConfig


def growing_limit(settings: GrowingStepsConfig, version: int) -> int | None:
    """The step limit of a ticket admitted at a policy version; None if the limit does not grow (interval 0)."""
    if not settings.interval:
        return None
    increases = settings.cap_step // settings.interval
    done = min(version // settings.interval, increases)
    return settings.initial + int(done * (settings.max - settings.initial) / increases)
