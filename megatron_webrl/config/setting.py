"""How settings are declared and checked: default, meaning and limits in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_webrl.util.text import close_matches, has_address_with_user


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line and says what to change."""


def setting(
    default: Any, help: str, *, low=None, high=None, above=None, choices=None, check=None, only_with=None, own=False
) -> Any:
    """A configuration field: default, meaning, and inclusive limits (`above` is exclusive).

    `check` returns what is wrong with a value, to follow the setting's name in a message; empty if nothing is.
    `only_with`: another setting of the section, which must be on, or (name, *values), which must have one of these
    values; otherwise this setting has no effect and keeps its default. `own`: instead of a choice the value can be the
    import path of something of the user's own.
    """
    limits = {
        "help": help, "low": low, "high": high, "above": above, "choices": choices, "check": check,
        "only_with": only_with, "own": own
    }  # fmt: skip
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=limits)
    return field(default=default, metadata=limits)


def own_options(only_with: str | None = None) -> Any:
    """The setting `options` of a section that names something of the user's own."""
    return setting(
        {},
        "Options of what the import path names: values of the dataclass by which it annotates its argument `options`.",
        only_with=only_with,
    )


def is_import_path(value: object) -> bool:
    """Whether the value of a setting is an import path such as my_package.my_module:name."""
    return ":" in str(value)


@dataclass(frozen=True)
class Variants:
    """The classes of a section, by the value of its setting `key`; `own` is the class of an import path."""

    key: str
    classes: Mapping[str, type]
    own: type | None = None

    def choose(self, section: str, name: Any) -> type:
        """The class of `name`. Raises ConfigError for a name that is not known."""
        if self.own is not None and is_import_path(name):
            return self.own
        if name not in self.classes:
            hint = close_matches(str(name), list(self.classes))
            raise ConfigError(
                f"{section}.{self.key}={name!r} is not one of {', '.join(self.classes)}"
                + (", nor an import path such as my_package.my_module:Name" if self.own else "")
                + hint
            )
        return self.classes[name]

    def make(self, section: str, name: Any) -> Any:
        """The default settings of `name`. Raises ConfigError."""
        return self.choose(section, name)(**{self.key: name})

    def distinct(self) -> dict[type, list[str]]:
        """Names of each class; those of an import path are shown by their form."""
        found: dict[type, list[str]] = {}
        for name, kind in [*self.classes.items(), *([("module:name", self.own)] if self.own else [])]:
            found.setdefault(kind, []).append(name)
        return found


def variants(key: str, classes: Mapping[str, type], own: type | None = None) -> Any:
    """A section whose class is chosen by its setting `key`; by default the first one."""
    return field(default_factory=next(iter(classes.values())), metadata={"variants": Variants(key, classes, own)})


def check_sections(config: Any, prefix: str = "") -> None:
    """Refuse values outside of their limits, settings without effect, and what a section's `check` refuses.

    Raises ConfigError.
    """
    for spec in dataclasses.fields(config):
        key, value = prefix + spec.name, getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            check_sections(value, key + ".")
        else:
            _check_value(key, value, spec.metadata)
            _check_effect(config, spec, prefix)
    if prefix and hasattr(config, "check"):
        config.check()


def _check_value(key: str, value: Any, limit: Mapping[str, Any]) -> None:
    if limit.get("choices") and value not in limit["choices"] and not (limit["own"] and is_import_path(value)):
        own = ", nor an import path such as my_package.my_module:name" if limit["own"] else ""
        raise ConfigError(f"{key}={value!r} is not one of {', '.join(limit['choices'])}{own}")
    if limit.get("check") and (problem := limit["check"](value)):
        raise ConfigError(f"{key}{problem}")
    if has_address_with_user(str(value)):
        raise ConfigError(
            f"{key} holds an address with a user or a password, which would be stored with the configuration; "
            "leave them out, and name them where docs/operations.md says (MLflow: MLFLOW_TRACKING_URI or _PASSWORD)"
        )
    for name, broken, words in (
        ("low", lambda v, b: not v >= b, "must be at least"),
        ("high", lambda v, b: not v <= b, "must be at most"),
        ("above", lambda v, b: not v > b, "must be greater than"),
    ):
        if limit.get(name) is not None and broken(value, limit[name]):
            raise ConfigError(f"{key}={value} {words} {limit[name]}")


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """The settings as a flat dictionary of dotted keys."""
    result: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value, key = getattr(config, spec.name), f"{prefix}{spec.name}"
        result |= flatten_config(value, key + ".") if dataclasses.is_dataclass(value) else {key: value}
    return result


def default_of(spec: dataclasses.Field[Any]) -> Any:
    """The default of a field."""
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def _check_effect(config: Any, spec: dataclasses.Field[Any], prefix: str) -> None:
    """Refuse a setting that another one of its section leaves without effect. Its value may be a secret."""
    if not spec.metadata.get("only_with") or getattr(config, spec.name) == default_of(spec):
        return
    needed = spec.metadata["only_with"]
    name, *values = [needed] if isinstance(needed, str) else needed
    other = getattr(config, name)
    if other in values if values else other:
        return
    shown = str(other).lower() if isinstance(other, bool) else other or '""' if isinstance(other, str) else f"{other:g}"
    raise ConfigError(
        f"{prefix}{spec.name} has no effect with {prefix}{name}={shown}; leave it out, or set {prefix}{name}"
        + (f" to {' or '.join(values)}" if values else "")
    )
