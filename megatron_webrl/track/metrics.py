"""Metrics of one update, and those of its batch of episodes and steps; docs/metrics.md describes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_webrl.types import COORDINATE_ACTION_KINDS, Group, Step, Trajectory
from megatron_webrl.util.text import metric_label

UPDATES_FILE = "updates.jsonl"
PASSIVE_ACTIONS = ("wait", "answer")  # are not expected to change the page


@dataclass(frozen=True)
class UpdateSeconds:
    """Wall-clock durations of the parts of an update."""

    rollout: float  # from the start of the first to the end of the last episode of the batch
    train: float  # packing, log-probabilities, forward, backward, optimiser
    sync: float  # weight transfer to the engines
    wait: float  # the trainer waiting for groups
    image_wait: float  # part of train: the longest wait of a rank for images


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of the update that made policy `version`."""

    version: int
    groups: int
    reward_mean: float  # over trainable episodes
    steps_mean: float  # per trajectory
    response_tokens_mean: float  # per step
    staleness_mean: float  # versions, over trajectories, by the oldest token
    staleness_max: int
    clip_fraction: float  # of response tokens
    logprob_mismatch_max: float | None  # |engine - trainer| over tokens of the updated version; None without any
    logprob_mismatch_tokens: int  # number of those tokens
    tokens_per_second: float  # trained tokens, prompts included, by wall clock
    seconds: UpdateSeconds
    finished_at: float = 0.0  # unix time, seconds
    extra: dict[str, float] = field(default_factory=dict)  # further metrics, by MLflow name

    def to_json(self) -> dict[str, Any]:
        """The update in updates.jsonl and summary.json."""
        return asdict(self)


def update_metrics(update: Mapping[str, Any]) -> dict[str, float]:
    """MLflow metrics from a line of updates.jsonl."""
    flat = {k: float(v) for k, v in update.items() if isinstance(v, int | float) and k != "version"}
    return flat | {f"seconds/{k}": v for k, v in update["seconds"].items()} | update["extra"]


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a batch's episodes: success, length, format errors, actions."""
    trajectories = [t for g in groups for t in g.trajectories if t.trainable]
    steps = [s for t in trajectories for s in t.steps]
    actions = Counter(s.action.kind for s in steps if s.action is not None)
    metrics = {
        "success_rate": mean([t.outcome == "success" for t in trajectories]),
        "masked_episodes": float(sum(not t.trainable for g in groups for t in g.trajectories)),
        "tries_per_episode": mean([t.tries for g in groups for t in g.trajectories]),
        "format_error_rate": mean([s.format_error is not None for s in steps]),
        "truncated_rate": mean([s.finish_reason == "length" for s in steps]),
        "not_recorded_requests_per_episode": mean([t.steps[-1].not_recorded_requests for t in trajectories if t.steps]),
        "page_unchanged_rate": mean([not s.page_changed for s in steps]),
        "versions_per_step": mean([len(set(s.versions.tolist())) for s in steps]),
        "seconds_generation_per_step": mean([s.seconds_generation for s in steps]),
        "seconds_browser_per_step": mean([s.seconds_browser for s in steps]),
        "prompt_tokens_per_step": mean([len(s.prompt_token_ids) for s in steps]),
        "prefix_cache_hit_rate": sum(s.cached_prompt_tokens for s in steps)
        / max(1, sum(len(s.prompt_token_ids) for s in steps)),
    }
    for name, chosen in (("success", True), ("failure", False)):
        lengths = [len(t.steps) for t in trajectories if (t.outcome == "success") is chosen]
        if lengths:
            metrics[f"steps_mean/{name}"] = mean(lengths)
    leniencies = Counter(name for step in steps for name in step.leniencies)
    metrics |= {f"leniency/{name}": count / len(steps) for name, count in sorted(leniencies.items())}
    kinds = {*COORDINATE_ACTION_KINDS, *actions}
    metrics |= {f"action_rate/{kind}": actions[kind] / max(1, len(steps)) for kind in sorted(kinds)}
    by_environment: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        by_environment.setdefault(metric_label(trajectory.task.environment), []).append(trajectory.outcome == "success")
    return metrics | {f"success_rate/{name}": mean(values) for name, values in by_environment.items()}


def step_metrics(groups: Sequence[Group], uses_memory: bool) -> dict[str, float]:
    """Metrics by MLflow name over the trainable episodes; none without any. `uses_memory`: responses have a Memory."""
    trajectories = [t for group in groups for t in group.trajectories if t.trainable]
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if not steps:
        return {}
    metrics = {
        **_mean_and_max("response_characters", [step.response_characters for step in steps]),
        "response_tokens_max": float(max(len(step.response_token_ids) for step in steps)),
        "stuck_rate": mean([_is_stuck(step) for step in steps]),
        **_versions(trajectories),
    }
    if uses_memory:
        characters = [step.memory_characters for step in steps]
        metrics["memory_missing_rate"] = mean([count < 0 for count in characters])
        metrics["memory_empty_rate"] = mean([count == 0 for count in characters])
        metrics |= _mean_and_max("memory_characters", [count for count in characters if count >= 0])
    for name, chosen in (("success", True), ("failure", False)):
        alike = [step for t in trajectories if (t.outcome == "success") is chosen for step in t.steps]
        if alike:
            metrics[f"response_tokens_mean/{name}"] = mean_response_tokens(alike)
            metrics[f"page_unchanged_rate/{name}"] = mean([not step.page_changed for step in alike])
    return metrics


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


def rollout_seconds(trajectories: Sequence[Trajectory]) -> float:
    """Seconds from the start of the first to the end of the last episode."""
    return max(t.finished_at for t in trajectories) - min(t.finished_at - t.seconds for t in trajectories)


def mean_response_tokens(steps: Sequence[Step]) -> float:
    return mean([len(s.response_token_ids) for s in steps])


def mean(values: Sequence[float] | Sequence[int] | Sequence[bool]) -> float:
    """Arithmetic mean; 0 for an empty sequence."""
    return float(np.mean(values)) if len(values) else 0.0
