"""Task sources by name."""

from __future__ import annotations

from dataclasses import replace

from megatron_webrl.config.tasks import (
    FileTasksConfig,
    MixTasksConfig,
    OwnTasksConfig,
    PageTasksConfig,
    SamplerConfig,
    TasksConfig,
    task_parts,
)
from megatron_webrl.tasks import miniwob, scripted_policies
from megatron_webrl.tasks.files.source import FileTaskSource
from megatron_webrl.tasks.import_path import load_source
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.tasks.mix import TaskMix
from megatron_webrl.tasks.sites import site_task_source as sites
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SiteTaskSource
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.types import ActionKind

LOCAL_SOURCES: dict[str, type[MiniWobTaskSource] | type[SiteTaskSource]] = {
    miniwob.SOURCE_NAME: MiniWobTaskSource,
    sites.SOURCE_NAME: SiteTaskSource,
}
"""Sources with pages of their own."""


def make_source(tasks: TasksConfig) -> TaskSource | TaskMix:
    """Start the configured source, or all of a mix; the caller closes it. Raises ConfigError."""
    if isinstance(tasks, MixTasksConfig):
        parts = tasks.parts
        return TaskMix({part.name: _make_one_source(part.tasks) for part in parts}, [part.weight for part in parts])
    return _make_one_source(tasks)


def _make_one_source(tasks: TasksConfig) -> TaskSource:
    """Start a source other than a mix; the caller closes it. Raises ConfigError."""
    if isinstance(tasks, PageTasksConfig):
        return LOCAL_SOURCES[tasks.source](tasks.environments, tasks)
    if isinstance(tasks, OwnTasksConfig):
        return load_source(tasks)
    assert isinstance(tasks, FileTasksConfig), tasks.source
    return FileTaskSource(tasks)


def make_all_sources(tasks: TasksConfig) -> dict[str, TaskSource]:
    """Start all sources that have pages of their own, each with all of its environments, and those of import paths,
    whose tasks may be of a source by that path; the caller closes them. Raises ConfigError.
    """
    tasks_of_all = replace(tasks, sampler=SamplerConfig())  # weights may be of environments of another source
    found: dict[str, TaskSource] = {
        miniwob.SOURCE_NAME: MiniWobTaskSource(miniwob.all_environments(), tasks_of_all),
        sites.SOURCE_NAME: SiteTaskSource(tuple(ENVIRONMENTS), tasks_of_all),
    }
    for part in task_parts(tasks).values():
        if part.from_import_path:
            found[part.source] = load_source(part)
    return found


def scripted_environments(source: str) -> tuple[str, ...]:
    return {"miniwob": scripted_policies.supported_environments(), "sites": tuple(ENVIRONMENTS)}[source]


def required_actions(source: str, environment: str) -> tuple[ActionKind, ...]:
    """The actions of browser.actions that the scripted policy of an environment needs."""
    return scripted_policies.required_actions(environment) if source == "miniwob" else ()
