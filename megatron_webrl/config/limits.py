"""Check each setting against the limits that the schema declares."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_webrl.config.setting import ConfigError


def check_limits(config: Any, prefix: str) -> None:
    """Refuse values outside of what their settings allow. Raises ConfigError."""
    for spec in dataclasses.fields(config):
        key, value, limit = prefix + spec.name, getattr(config, spec.name), spec.metadata
        if dataclasses.is_dataclass(value):
            check_limits(value, key + ".")
            continue
        if limit.get("choices") and value not in limit["choices"]:
            raise ConfigError(f"{key}={value!r} is not one of {', '.join(limit['choices'])}")
        if limit.get("check") and (problem := limit["check"](value)):
            raise ConfigError(f"{key}{problem}")
        for name, broken, words in (
            ("low", lambda v, b: not v >= b, "must be at least"),
            ("high", lambda v, b: not v <= b, "must be at most"),
            ("above", lambda v, b: not v > b, "must be greater than"),
        ):
            if limit.get(name) is not None and broken(value, limit[name]):
                raise ConfigError(f"{key}={value} {words} {limit[name]}")
