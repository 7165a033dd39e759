"""Formats of task files: the field of a row that holds each field of a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FILE_SOURCES, FileTasksConfig
from megatron_webrl.util.text import close_matches

TASK_FIELDS = ("id", "instruction", "website", "benchmark", "domain", "subdomain", "difficulty", "facts", "answer")
NEEDED_FIELDS = ("id", "instruction", "website")


@dataclass(frozen=True)
class FieldMap:
    """Where a row holds the fields of a task."""

    names: Mapping[str, tuple[str, ...]]  # fields of the row by field of the task; the first that a row has is read
    required: tuple[str, ...] = NEEDED_FIELDS  # fields of a task that every row has
    benchmark: str = ""  # of rows without one
    named: tuple[str, ...] = ()  # fields of a task that tasks.fields names: a row has them, even if null

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a row that are read."""
        return tuple(name for names in self.names.values() for name in names)

    @property
    def digest(self) -> str:
        """Eight hex digits that differ between maps."""
        content = json.dumps([sorted(self.names.items()), sorted(self.required), self.benchmark, sorted(self.named)])
        return hashlib.blake2b(content.encode(), digest_size=4).hexdigest()


FORMATS: dict[str, FieldMap] = {
    "webgym": FieldMap(
        {
            "id": ("task_id",),
            "instruction": ("task_name",),
            "website": ("website",),
            "benchmark": ("benchmark_name",),
            "domain": ("domain",),
            "subdomain": ("subdomain",),
            "difficulty": ("difficulty",),
            "facts": ("evaluator_reference",),
            "answer": ("definite_answer", "reference_answer"),
        },
        required=(*NEEDED_FIELDS, "difficulty", "facts"),
    ),
    "online_mind2web": FieldMap(
        {"id": ("task_id",), "instruction": ("confirmed_task",), "website": ("website",), "difficulty": ("level",)},
        required=(*NEEDED_FIELDS, "difficulty"),
        benchmark="Online-Mind2Web",
    ),
    "webvoyager": FieldMap(
        {"id": ("id",), "instruction": ("ques",), "website": ("web",), "domain": ("web_name",)},
        benchmark="WebVoyager",
    ),
    "file": FieldMap({}),
}
assert tuple(FORMATS) == FILE_SOURCES


def make_field_map(source: str, fields: Mapping[str, str]) -> FieldMap:
    """The map of a format, with `fields` (tasks.fields) in place of its own entries. Raises ConfigError."""
    for name, column in fields.items():
        if name not in TASK_FIELDS:
            raise ConfigError(f"tasks.fields: {name!r} is not one of {', '.join(TASK_FIELDS)}{_near(name)}")
        if not column:
            raise ConfigError(f"tasks.fields.{name} is empty; give the name of a field of the task file")
    base = FORMATS[source]
    names = {name: (fields[name],) if name in fields else base.names.get(name, ()) for name in TASK_FIELDS}
    found = replace(base, names={name: columns for name, columns in names.items() if columns}, named=tuple(fields))
    missing = [name for name in NEEDED_FIELDS if name not in found.names]
    if missing:
        example = ", ".join(f"{name}: ..." for name in missing)
        raise ConfigError(
            f"tasks.source={source} does not know the fields {', '.join(missing)} of a task; name them in "
            f"tasks.fields={{{example}}}"
        )
    return found


def field_map_of(tasks: FileTasksConfig) -> FieldMap:
    """The map of a configuration. Raises ConfigError."""
    return make_field_map(tasks.source, tasks.fields)


def _near(name: str) -> str:
    return close_matches(name, TASK_FIELDS)
