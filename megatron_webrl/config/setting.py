"""How a setting is declared: default, meaning and limits in one place."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, help: str, *, low=None, high=None, above=None, choices=None, check=None) -> Any:
    """A configuration field: default, meaning, and inclusive limits (`above` is exclusive).

    `check` returns what is wrong with a value, to follow the setting's name in a message; empty if nothing is.
    """
    limits = {"help": help, "low": low, "high": high, "above": above, "choices": choices, "check": check}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=limits)
    return field(default=default, metadata=limits)


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line and says what to change."""
