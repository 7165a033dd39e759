"""Metrics of a batch's steps: sizes of responses and of Memory, pages that do not change, policy versions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_webrl.tracking.metrics import mean, mean_response_tokens
from megatron_webrl.types import Group, Step, Trajectory

PASSIVE_ACTIONS = ("wait", "answer")  # are not expected to change the page


def step_metrics(groups: Sequence[Group], uses_memory: bool) -> dict[str, float]:
    """Metrics by MLflow name over the trainable episodes. `uses_memory`: the response form has a Memory."""
    trajectories = [t for group in groups for t in group.trajectories if t.trainable]
    steps = [step for trajectory in trajectories for step in trajectory.steps]
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
    characters = [step.response_characters for step in steps]
    return {
        "response_characters_mean": mean(characters),
        "response_characters_max": float(max(characters, default=0)),
        "response_tokens_max": float(max((len(step.response_token_ids) for step in steps), default=0)),
    }


def _memory(steps: Sequence[Step]) -> dict[str, float]:
    characters = [step.memory_characters for step in steps]
    present = [count for count in characters if count >= 0]
    return {
        "memory_missing_rate": mean([count < 0 for count in characters]),
        "memory_empty_rate": mean([count == 0 for count in characters]),
        "memory_characters_mean": mean(present),
        "memory_characters_max": float(max(present, default=0)),
    }


def _is_stuck(step: Step) -> bool:
    """Whether an action that should change the page left it unchanged."""
    return step.action is not None and step.action.kind not in PASSIVE_ACTIONS and not step.page_changed


def _versions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Policy versions of the response tokens: their number, and the updates between the oldest and the newest."""
    by_trajectory = [[s.versions for s in t.steps if len(s.versions)] for t in trajectories]
    by_step = [versions for steps in by_trajectory for versions in steps]
    distinct = np.unique(np.concatenate(by_step)) if by_step else ()
    within = [_span(versions) for versions in by_step]
    across = [_span(np.concatenate(steps)) for steps in by_trajectory if steps]
    return {
        "versions_per_batch": float(len(distinct)),
        "updates_within_step_mean": mean(within),
        "updates_within_step_max": float(max(within, default=0)),
        "updates_across_steps_mean": mean(across),
        "updates_across_steps_max": float(max(across, default=0)),
    }


def _span(versions: np.ndarray) -> int:
    return int(versions.max()) - int(versions.min())
