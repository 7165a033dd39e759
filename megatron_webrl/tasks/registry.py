"""The task sources by name."""

from __future__ import annotations

from megatron_webrl.config import ConfigError, TasksConfig
from megatron_webrl.tasks import miniwob, miniwob_page, oracles
from megatron_webrl.tasks.miniwob import Miniwob
from megatron_webrl.tasks.sites import source as sites
from megatron_webrl.tasks.sites.catalog import ENVIRONMENTS
from megatron_webrl.tasks.sites.source import Sites
from megatron_webrl.tasks.source import StepLimits, TaskSource
from megatron_webrl.types import ActionKind


def make_source(tasks: TasksConfig) -> TaskSource:
    """The configured source, started; the caller closes it. Raises ConfigError."""
    limits = StepLimits.of(tasks)
    if tasks.source == "miniwob":
        if tasks.latency.median or tasks.latency.medians:
            raise ConfigError("tasks.latency has no effect on tasks.source=miniwob; leave it out, or use sites")
        return Miniwob(tasks.environments, tasks.max_steps, limits=limits, sampler=tasks.sampler)
    if tasks.source == "sites":
        return Sites(tasks.environments, tasks.max_steps, tasks.latency, limits=limits, sampler=tasks.sampler)
    raise ConfigError(f"tasks.source={tasks.source!r} is not known; use miniwob or sites")


def every_source(tasks: TasksConfig) -> dict[str, TaskSource]:
    """All sources by name, each with all of its environments, started; the caller closes them. Raises ConfigError."""
    limits = StepLimits.of(tasks)
    return {
        miniwob.NAME: Miniwob(miniwob_page.all_environments(), tasks.max_steps, limits=limits),
        sites.NAME: Sites(tuple(ENVIRONMENTS), tasks.max_steps, tasks.latency, limits=limits),
    }


def scripted_environments(source: str) -> tuple[str, ...]:
    """The environments of a source that a script solves."""
    return {"miniwob": oracles.environments(), "sites": tuple(ENVIRONMENTS)}[source]


def further_actions(source: str, environment: str) -> tuple[ActionKind, ...]:
    """What the script of an environment needs that browser.actions must enable."""
    return oracles.further_actions(environment) if source == "miniwob" else ()
