"""Metrics of credit assignment: what its options change in a batch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_webrl.config.advantage import AdvantageConfig, AnchoredConfig
from megatron_webrl.track.metrics import mean
from megatron_webrl.trainer.credit.advantages import is_overlong, steps_by_state
from megatron_webrl.types import Group


def credit_metrics(groups: Sequence[Group], settings: AdvantageConfig) -> dict[str, float]:
    """Metrics by MLflow name over the trainable episodes; those of options that are off are left out."""
    members = [[t for t in group.trajectories if t.trainable] for group in groups]
    metrics: dict[str, float] = {}
    if settings.overlong == "mask":
        metrics["overlong_masked_rate"] = mean([is_overlong(t) for trajectories in members for t in trajectories])
    if isinstance(settings, AnchoredConfig) and settings.anchor_weight:
        steps = sum(len(t.steps) for trajectories in members for t in trajectories)
        states = [state for trajectories in members for state in steps_by_state(trajectories).values()]
        anchored = sum(len(state) for state in states if len(state) > 1)
        metrics["anchored_step_rate"] = anchored / max(1, steps)
    return metrics
