"""Checks of the settings tasks.* before a run starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import SamplerConfig, TasksConfig
from megatron_webrl.tasks.sampler.source_checks import check_source
from megatron_webrl.tasks.sampler.units import draws_environments
from megatron_webrl.types import DIFFICULTIES
from megatron_webrl.util.text import close_matches


def check_tasks(tasks: TasksConfig) -> None:
    """Raise ConfigError for unknown names and for samplers that cannot draw any environment."""
    check_source(tasks)
    if not tasks.environments:
        raise ConfigError("tasks.environments is empty; name at least one environment")
    for key in ("max_steps_by_difficulty", "evaluation_max_steps_by_difficulty"):
        limits = getattr(tasks, key)
        _check_names(f"tasks.{key}", limits, DIFFICULTIES, ", ".join(DIFFICULTIES))
        for difficulty, steps in limits.items():
            if steps < 1:
                raise ConfigError(f"tasks.{key}.{difficulty}={steps} must be at least 1")
    if not draws_environments(tasks):
        _check_row_sampler(tasks)
    elif tasks.sampler.per != SamplerConfig().per:
        raise ConfigError(
            f"tasks.sampler.per={tasks.sampler.per} has no effect on tasks.source={tasks.source}, which has no task "
            "file; leave it out"
        )
    _check_sampler(tasks.sampler, tasks.environments)


def _check_row_sampler(tasks: TasksConfig) -> None:
    sampler, own_source = tasks.sampler, ":" in tasks.source  # a source of one's own may draw as it likes
    if sampler.weights and not own_source:
        raise ConfigError(
            f"tasks.sampler.weights={sampler.weights} are weights of environments, which tasks.source={tasks.source} "
            "does not have; use tasks.sampler.difficulty_weights"
        )
    if sampler.name == "ratio" and sampler.per != SamplerConfig().per and not own_source:
        raise ConfigError(
            f"tasks.sampler.per={sampler.per} has no effect on tasks.sampler.name=ratio, which draws difficulties; "
            "leave it out"
        )


def _check_sampler(sampler: SamplerConfig, environments: Sequence[str]) -> None:
    for key in ("weights", "difficulty_weights"):
        weights = getattr(sampler, key)
        if weights and sampler.name != "ratio":
            raise ConfigError(
                f"tasks.sampler.{key} has no effect on tasks.sampler.name={sampler.name}; leave it out, or use ratio"
            )
        for name, weight in weights.items():
            if not (weight >= 0 and math.isfinite(weight)):
                raise ConfigError(f"tasks.sampler.{key}.{name}={weight} must be a number of at least 0")
    if sampler.target != SamplerConfig().target and sampler.name != "near_target":
        raise ConfigError(
            f"tasks.sampler.target={sampler.target} has no effect on tasks.sampler.name={sampler.name}; leave it out, "
            "or use near_target"
        )
    _check_names("tasks.sampler.weights", sampler.weights, environments, "tasks.environments")
    _check_names("tasks.sampler.difficulty_weights", sampler.difficulty_weights, DIFFICULTIES, ", ".join(DIFFICULTIES))
    if sampler.name == "ratio" and bool(sampler.weights) == bool(sampler.difficulty_weights):
        raise ConfigError(
            "tasks.sampler.name=ratio needs either tasks.sampler.weights or tasks.sampler.difficulty_weights; "
            f"{'both are' if sampler.weights else 'neither is'} given"
        )
    if not any(sampler.weights.get(name, 1.0) for name in environments):
        raise ConfigError("tasks.sampler.weights is 0 for every one of tasks.environments; raise one")


def _check_names(key: str, names: Mapping[str, object], known: Sequence[str], allowed: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{key}: {name!r} is not one of {allowed}{close_matches(name, known)}")
