"""Metrics of a batch's steps: sizes of responses and of Memory, pages that do not change, policy versions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_webrl.track.metrics import mean, mean_response_tokens
from megatron_webrl.types import Group, Step, Trajectory

PASSIVE_ACTIONS = ("wait", "answer")  # are not expected to change the page


def step_metrics(groups: Sequence[Group], uses_memory: bool) -> dict[str, float]:
    """Metrics by MLflow name over the trainable episodes; none without any. `uses_memory`: responses have a Memory."""
    trajectories = [t for group in groups for t in group.trajectories if t.trainable]
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if not steps:
        return {}
    metrics = _sizes(steps) | {"stuck_rate": mean([_is_stuck(step) for step in steps])} | _versions(trajectories)
    if uses_memory:
        metrics |= _memory(steps)
    for name, chosen in (("success", True), ("failure", False)):
        alike = [step for t in trajectories if (t.outcome == "success") is chosen for step in t.steps]
        if alike:
            metrics[f"response_tokens_mean/{name}"] = mean_response_tokens(alike)
            metrics[f"page_unchanged_rate/{name}"] = mean([not step.page_changed for step in alike])
    return metrics


def _sizes(steps: Sequence[Step]) -> dict[str, float]:
    return {
        **_mean_and_max("response_characters", [step.response_characters for step in steps]),
        "response_tokens_max": float(max(len(step.response_token_ids) for step in steps)),
    }


def _memory(steps: Sequence[Step]) -> dict[str, float]:
    characters = [step.memory_characters for step in steps]
    return {
        "memory_missing_rate": mean([count < 0 for count in characters]),
        "memory_empty_rate": mean([count == 0 for count in characters]),
        **_mean_and_max("memory_characters", [count for count in characters if count >= 0]),
    }


def _is_stuck(step: Step) -> bool:
    """Whether an action that should change the page left it unchanged."""
    return step.action is not None and step.action.kind not in PASSIVE_ACTIONS and not step.page_changed


def _versions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Policy versions of the response tokens: their number, and the updates between the oldest and the newest."""
    by_trajectory = [[s.versions for s in t.steps if len(s.versions)] for t in trajectories]
    by_step = [versions for steps in by_trajectory for versions in steps]
    if not by_step:
        return {}
    return {
        "versions_per_batch": float(len(np.unique(np.concatenate(by_step)))),
        **_mean_and_max("updates_within_step", [_span(versions) for versions in by_step]),
        **_mean_and_max("updates_across_steps", [_span(np.concatenate(steps)) for steps in by_trajectory if steps]),
    }


def _mean_and_max(name: str, values: Sequence[int]) -> dict[str, float]:
    """The metrics `<name>_mean` and `<name>_max`; none without values."""
    return {f"{name}_mean": mean(values), f"{name}_max": float(max(values))} if values else {}


def _span(versions: np.ndarray) -> int:
    return int(versions.max()) - int(versions.min())
