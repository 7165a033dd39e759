"""Functions and classes of other packages, named in a setting by import path, and the options that they take."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_webrl.config.setting import ConfigError, is_import_path
from megatron_webrl.util.text import close_matches, first_line

OWN_CODE_FILE = "own_code.json"  # of a run: what it uses of other packages (`files_of`), as of its latest start
T = TypeVar("T")


def find(path: str, setting: str) -> Any:
    """What an import path `package.module:name` names; `setting` is the key of the setting that holds it.

    Raises ConfigError: no such path, a module that cannot be imported, no such name.
    """
    where = f"{setting}={path}"
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ConfigError(f"{where} is not an import path such as my_package.my_module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's: importing it can raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{where}: {module_name} cannot be imported: {reason}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {module_name} has no {name}{close_matches(part, dir(found))}")
        found = getattr(found, part)
    return found


def find_function(
    path: str, setting: str, arguments: Sequence[str], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A function that can be called with these positional arguments, its `options` bound (`bind_options`).

    `options`: None where the section of the setting has none. Raises ConfigError, also for another signature.
    """
    found = find(path, setting)
    if not callable(found):
        raise ConfigError(f"{setting}={path} is {kind_of(found)}, not a function")
    bound = found if options is None else bind_options(found, path, setting, options)
    try:
        inspect.signature(bound).bind(*arguments)
    except (TypeError, ValueError) as error:
        shown = ", ".join(arguments)
        raise ConfigError(f"{setting}={path} cannot be called with ({shown}): {first_line(error)}") from error
    return bound


def find_subclass(path: str, setting: str, base: type, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A subclass of `base`, without abstract methods, its `options` bound (`bind_options`). Raises ConfigError."""
    found = find(path, setting)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{setting}={path} is no subclass of {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{setting}={path} does not implement {', '.join(missing)} of {base.__name__}")
    return bind_options(found, path, setting, options)


def bind_options(found: Callable[..., T], path: str, setting: str, options: Mapping[str, Any]) -> Callable[..., T]:
    """A function or class with its argument `options` bound, if it has one: the dataclass by which it is annotated.

    `options`: values of its fields. Raises ConfigError for others, and for options without such an argument.
    """
    key = f"{setting.rpartition('.')[0]}.options"
    parameter = inspect.signature(found).parameters.get("options")
    if parameter is None:
        if options:
            raise ConfigError(f"{key}={dict(options)}, but {path} has no argument `options`; leave them out")
        return found
    alone = SimpleNamespace(__annotations__={"options": parameter.annotation})  # others may be of other modules
    try:
        kind = typing.get_type_hints(alone, vars(sys.modules[found.__module__]))["options"]
    except (NameError, TypeError, SyntaxError) as error:
        raise ConfigError(f"{setting}={path}: its annotation of `options` is wrong: {first_line(error)}") from error
    if not (inspect.isclass(kind) and dataclasses.is_dataclass(kind)):
        raise ConfigError(f"{setting}={path}: its argument `options` is not annotated with a dataclass")
    try:
        values = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(options)))
    except OmegaConfBaseException as error:
        known = ", ".join(field.name for field in dataclasses.fields(kind)) or "none"
        raise ConfigError(f"{key} of {path}: {first_line(error)}; it has {known}") from error
    return partial(found, options=values)


def kind_of(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def named_in(config: Any, prefix: str = "") -> dict[str, list[str]]:
    """The import paths of a configuration by the key of their setting."""
    found: dict[str, list[str]] = {}
    for spec in dataclasses.fields(config):
        key, value = f"{prefix}{spec.name}", getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            found |= named_in(value, f"{key}.")
        elif spec.metadata.get("own"):
            values = value if isinstance(value, list) else [value]
            if paths := [each for each in values if is_import_path(each)]:
                found[key] = paths
    for part in getattr(config, "parts", ()):  # of tasks.mix
        found |= named_in(part.tasks, f"{prefix}mix.{part.name}.")
    return found


def files_of(config: Any) -> dict[str, dict[str, str]]:
    """What is run of other packages: for each import path its setting, the file of its module and the file's SHA-256.

    Empty strings for a module that is not installed here, or has no file.
    """
    found = {}
    for setting, paths in named_in(config).items():
        for path in paths:
            spec = None
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(path.partition(":")[0])
            file = spec.origin if spec and spec.has_location and spec.origin else ""
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
            found[path] = {"setting": setting, "file": file, "sha256": digest}
    return found
