"""Task sources by name."""

from __future__ import annotations

from dataclasses import replace

from megatron_webrl.config.tasks import FileTasksConfig, OwnTasksConfig, PageTasksConfig, SamplerConfig, TasksConfig
from megatron_webrl.tasks import miniwob, scripted_policies
from megatron_webrl.tasks.files.source import FileTaskSource
from megatron_webrl.tasks.import_path import load_source
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.tasks.sites import site_task_source as sites
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.types import ActionKind

LOCAL_SOURCES: dict[str, type[MiniWobTaskSource] | type[SiteTaskSource]] = {
    miniwob.SOURCE_NAME: MiniWobTaskSource,
    sites.SOURCE_NAME: SiteTaskSource,
}
"""Sources with pages of their own."""


def make_source(tasks: TasksConfig) -> TaskSource:
    """Start the configured source; the caller closes it. Raises ConfigError."""
    if isinstance(tasks, PageTasksConfig):
        return LOCAL_SOURCES[tasks.source](tasks.environments, tasks)
    if isinstance(tasks, OwnTasksConfig):
        return load_source(tasks)
    assert isinstance(tasks, FileTasksConfig), tasks.source
    return FileTaskSource(tasks)


def make_all_sources(tasks: TasksConfig) -> dict[str, TaskSource]:
    """Start all sources that have pages of their own, each with all of its environments, and that of an import path,
    whose tasks may be of a source by this path; the caller closes them. Raises ConfigError.
    """
    tasks_of_all = replace(tasks, sampler=SamplerConfig())  # weights may be of environments of another source
    found: dict[str, TaskSource] = {
        miniwob.SOURCE_NAME: MiniWobTaskSource(miniwob.all_environments(), tasks_of_all),
        sites.SOURCE_NAME: SiteTaskSource(tuple(ENVIRONMENTS), tasks_of_all),
    }
    if tasks.from_import_path:
        found[tasks.source] = load_source(tasks)
    return found


def scripted_environments(source: str) -> tuple[str, ...]:
    return {"miniwob": scripted_policies.supported_environments(), "sites": tuple(ENVIRONMENTS)}[source]


def required_actions(source: str, environment: str) -> tuple[ActionKind, ...]:
    """The actions of browser.actions that the scripted policy of an environment needs."""
    return scripted_policies.required_actions(environment) if source == "miniwob" else ()
