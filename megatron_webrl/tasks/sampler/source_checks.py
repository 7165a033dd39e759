"""Checks of the settings that belong to one kind of task source."""

from __future__ import annotations

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FILE_SOURCES, PAGE_SOURCES, TasksConfig
from megatron_webrl.util.text import close_matches

FILE_SETTINGS = ("train_file", "test_file", "fields", "allow_shared_websites")


def check_source(tasks: TasksConfig) -> None:
    """Raise ConfigError for an unknown source, and for settings that have no effect on it."""
    check_source_name(tasks.source)
    usual = TasksConfig()
    if tasks.from_files:
        if tasks.environments != usual.environments:
            raise ConfigError(f"tasks.environments has no effect on tasks.source={tasks.source}; leave it out")
        if tasks.latency != usual.latency and not tasks.offline_websites:
            raise ConfigError(
                f"tasks.latency has no effect on tasks.source={tasks.source} without tasks.offline_websites=true; "
                "leave it out"
            )
        if not (tasks.train_file or tasks.test_file):
            raise ConfigError(f"tasks.source={tasks.source} needs tasks.train_file, tasks.test_file or both")
    elif not tasks.from_import_path:
        for name in FILE_SETTINGS:
            if getattr(tasks, name) != getattr(usual, name):
                raise ConfigError(
                    f"tasks.{name} has no effect on tasks.source={tasks.source}; leave it out, or set tasks.source to "
                    f"{', '.join(FILE_SOURCES)}"
                )
    if tasks.source in PAGE_SOURCES and tasks.block_hours != usual.block_hours:
        raise ConfigError(
            f"tasks.block_hours={tasks.block_hours:g} has no effect on tasks.source={tasks.source}, whose tasks have "
            "no website; leave it out"
        )
    _check_growing_steps(tasks, usual)


def check_source_name(source: str) -> None:
    """Raise ConfigError for a name that no source has, and that is no import path."""
    known = (*PAGE_SOURCES, *FILE_SOURCES)
    if source not in known and ":" not in source:
        raise ConfigError(
            f"tasks.source={source!r} is not known{close_matches(source, known)}; use one of {', '.join(known)}, or an "
            "import path such as my_package.my_source:Source"
        )


def _check_growing_steps(tasks: TasksConfig, usual: TasksConfig) -> None:
    growing = tasks.growing_steps
    if not growing.interval:
        for name in ("initial", "max", "cap_step"):
            if getattr(growing, name) != getattr(usual.growing_steps, name):
                raise ConfigError(
                    f"tasks.growing_steps.{name}={getattr(growing, name)} has no effect with "
                    "tasks.growing_steps.interval=0; leave it out, or set interval"
                )
        return
    if not tasks.from_import_path and tasks.max_steps != usual.max_steps:
        raise ConfigError(
            f"tasks.max_steps={tasks.max_steps} has no effect with tasks.growing_steps.interval={growing.interval}, "
            "whose limits replace it; leave it out"
        )
    if growing.cap_step < growing.interval:
        raise ConfigError(
            f"tasks.growing_steps.cap_step={growing.cap_step} is below tasks.growing_steps.interval="
            f"{growing.interval}: the limit would never grow; raise it"
        )
    if growing.max < growing.initial:
        raise ConfigError(
            f"tasks.growing_steps.max={growing.max} is below tasks.growing_steps.initial={growing.initial}; raise it"
        )
