"""A task source of another package, by import path."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.util.text import close_matches, first_line

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
    factory = _find(tasks.source, setting)
    if not callable(factory):
        raise ConfigError(f"{setting} is {_kind(factory)}, not a class or a function")
    try:
        source = factory(tasks)
    except TypeError as error:
        raise ConfigError(f"{setting} cannot be called with the settings of tasks: {first_line(error)}") from error
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    missing += [name for name in ATTRIBUTES if not hasattr(source, name)]
    if missing:
        raise ConfigError(f"{setting} gives {_kind(source)}, which is no TaskSource: it has no {', '.join(missing)}")
    if not source.environments:
        raise ConfigError(f"{setting} has no environments; name at least one")
    return source


def _find(path: str, setting: str) -> Any:
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ConfigError(f"{setting} is not an import path such as my_package.my_source:Source")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{setting}: {module_name} cannot be imported: {first_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{setting}: {module_name} has no {name}{close_matches(part, dir(found))}")
        found = getattr(found, part)
    return found


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"
