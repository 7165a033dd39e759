"""A task source of another package, by import path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_webrl.config.import_path import find, kind_of
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.util.text import first_line

if TYPE_CHECKING:
    from megatron_webrl.tasks.source import TaskSource

METHODS = (
    "make_task", "training_task", "held_out_task", "evaluation_tasks",
    "can_reuse_page", "open", "result", "demonstrate", "close",
)  # fmt: skip
ATTRIBUTES = ("environments", "origins", "addresses")


def load_source(tasks: TasksConfig) -> TaskSource:
    """Call what tasks.source names (`package.module:Name`, a class or a function) with the settings. Raises ConfigError
    for a name that does not exist, and for something that is not a TaskSource.
    """
    setting = f"tasks.source={tasks.source}"
    factory = find(tasks.source, "tasks.source")
    if not callable(factory):
        raise ConfigError(f"{setting} is {kind_of(factory)}, not a class or a function")
    try:
        source = factory(tasks)
    except TypeError as error:
        raise ConfigError(f"{setting} cannot be called with the settings of tasks: {first_line(error)}") from error
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    missing += [name for name in ATTRIBUTES if not hasattr(source, name)]
    if missing:
        raise ConfigError(f"{setting} gives {kind_of(source)}, which is no TaskSource: it has no {', '.join(missing)}")
    if not source.environments:
        raise ConfigError(f"{setting} has no environments; name at least one")
    return source
