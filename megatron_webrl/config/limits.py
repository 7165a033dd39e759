"""Check each setting against the limits that the schema declares."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util.redaction import has_address_with_user


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
        if has_address_with_user(str(value)):
            raise ConfigError(
                f"{key} holds an address with a user or a password, which would be stored with the configuration; "
                "leave them out, and name them where docs/security.md says (MLflow: MLFLOW_TRACKING_URI or _PASSWORD)"
            )
        for name, broken, words in (
            ("low", lambda v, b: not v >= b, "must be at least"),
            ("high", lambda v, b: not v <= b, "must be at most"),
            ("above", lambda v, b: not v > b, "must be greater than"),
        ):
            if limit.get(name) is not None and broken(value, limit[name]):
                raise ConfigError(f"{key}={value} {words} {limit[name]}")
