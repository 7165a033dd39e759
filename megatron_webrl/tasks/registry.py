"""The task sources by name."""

from __future__ import annotations

from megatron_webrl.config import ConfigError, TasksConfig
from megatron_webrl.tasks.miniwob import Miniwob
from megatron_webrl.tasks.source import TaskSource


def make_source(tasks: TasksConfig) -> TaskSource:
    """The configured source, started; the caller closes it. Raises ConfigError."""
    if tasks.source == "miniwob":
        return Miniwob(tasks.environments, tasks.max_steps)
    raise ConfigError(f"tasks.source={tasks.source!r} is not known; use miniwob")
