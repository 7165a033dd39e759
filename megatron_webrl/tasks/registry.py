"""Task sources by name."""

from __future__ import annotations

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks import miniwob, miniwob_page, scripted_policies
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.tasks.sites import site_task_source as sites
from megatron_webrl.tasks.sites.catalog import ENVIRONMENTS
from megatron_webrl.tasks.sites.site_task_source import SiteTaskSource
from megatron_webrl.tasks.source import StepLimits, TaskSource
from megatron_webrl.types import ActionKind


def make_source(tasks: TasksConfig) -> TaskSource:
    """Start the configured source; the caller closes it. Raises ConfigError."""
    limits = StepLimits.from_config(tasks)
    if tasks.source == "miniwob":
        if tasks.latency.median_seconds:
            raise ConfigError("tasks.latency has no effect on tasks.source=miniwob; leave it out, or use sites")
        return MiniWobTaskSource(tasks.environments, tasks.max_steps, limits=limits, sampler=tasks.sampler)
    if tasks.source == "sites":
        return SiteTaskSource(tasks.environments, tasks.max_steps, tasks.latency, limits=limits, sampler=tasks.sampler)
    raise ConfigError(f"tasks.source={tasks.source!r} is not known; use miniwob or sites")


def make_all_sources(tasks: TasksConfig) -> dict[str, TaskSource]:
    """Start all sources, each with all of its environments; the caller closes them. Raises ConfigError."""
    limits = StepLimits.from_config(tasks)
    return {
        miniwob.SOURCE_NAME: MiniWobTaskSource(miniwob_page.all_environments(), tasks.max_steps, limits=limits),
        sites.SOURCE_NAME: SiteTaskSource(tuple(ENVIRONMENTS), tasks.max_steps, tasks.latency, limits=limits),
    }


def scripted_environments(source: str) -> tuple[str, ...]:
    return {"miniwob": scripted_policies.supported_environments(), "sites": tuple(ENVIRONMENTS)}[source]


def required_actions(source: str, environment: str) -> tuple[ActionKind, ...]:
    """The actions of browser.actions that the scripted policy of an environment needs."""
    return scripted_policies.required_actions(environment) if source == "miniwob" else ()
