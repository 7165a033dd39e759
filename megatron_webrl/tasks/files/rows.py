"""Rows of a task file: one line becomes a task, or an error that names the field, what was expected and what is there.

A row is never half-read: a field that a task has and a row gives must fit, whichever field it is.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FILE_SOURCES, FileTasksConfig
from megatron_webrl.tasks.web import ENVIRONMENT_NAME, SOURCE_NAME
from megatron_webrl.types import DIFFICULTIES, RubricFact, Task
from megatron_webrl.util import strict_json
from megatron_webrl.util.text import close_matches, shorten

EXPECTED = "a web address such as example.com or https://example.com/start"
LOCAL_SUFFIX = ".localhost"  # hosts that a browser server serves itself
_ADDRESS = re.compile(
    r"(?:(https?)://)?([^\s/?#@:\\]+)(?::([0-9]{1,5}))?(?:[/?#][^\s\\\x00-\x1f\x7f]*)?", re.IGNORECASE
)
_HOST = re.compile(r"(?:[a-z0-9_-]{1,63}\.)+[a-z0-9_-]{1,63}")


@functools.lru_cache(maxsize=4096)
def parse_website(text: str) -> tuple[str, str]:
    """The URL of the start page that a field `website` names, and its host: lower case, A-labels, no leading "www.".

    Without a scheme the URL is https, for local hosts http. Raises ValueError.
    """
    text = text.strip()
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3] or 443) < 65536:
        raise ValueError(text)
    host = match[2].removesuffix(".").lower()
    if not host.isascii():
        import idna  # of the browsers' extra; few hosts need it

        host = idna.encode(idna.uts46_remap(host, std3_rules=False, transitional=False)).decode().lower()
    if len(host) > 253 or not (_HOST.fullmatch(host) or host == LOCAL_SUFFIX[1:]):
        raise ValueError(host)
    website = host.removeprefix("www.")
    website = website if "." in website else host
    scheme = "https" if is_public(website) else "http"
    return text if match[1] else f"{scheme}://{text}", website


def is_public(website: str) -> bool:
    """Whether the pages of a website come from the network."""
    return website != LOCAL_SUFFIX[1:] and not website.endswith(LOCAL_SUFFIX)


TASK_FIELDS = ("id", "instruction", "website", "benchmark", "domain", "subdomain", "difficulty", "facts", "answer")
_TEXT_FIELDS = ("instruction", "website", "benchmark", "domain", "subdomain")
NEEDED_FIELDS = ("id", "instruction", "website")


@dataclass(frozen=True)
class FieldMap:
    """Where a row holds the fields of a task."""

    names: Mapping[str, tuple[str, ...]]  # field of the row by field of the task; for the answer there may be several
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

    def __hash__(self) -> int:
        return hash(self.digest)


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
            near = close_matches(name, TASK_FIELDS)
            raise ConfigError(f"tasks.fields: {name!r} is not one of {', '.join(TASK_FIELDS)}{near}")
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


MOST_FACTS = {"easy": 3, "medium": 6}  # of a difficulty; hard has more
DEFAULT_DIFFICULTY = "medium"  # of rows with neither difficulty nor facts
MAX_DIFFICULTY = 1000
MAX_LINE_BYTES = 16 * 2**20
_MISSING = object()
_FOUND_CHARACTERS = 60
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class RowError(ValueError):
    """A row that does not fit. The message says what was expected and found, without file and line."""


def parse_line(data: bytes) -> dict[str, Any]:
    """The object of a line. Raises RowError."""
    if len(data) > MAX_LINE_BYTES:
        raise RowError(f"expected a line of at most {MAX_LINE_BYTES} bytes, found a longer one")
    try:
        row = strict_json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise RowError(f"expected UTF-8, found byte 0x{data[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise RowError(f"expected a JSON object, found invalid JSON at column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # not of the standard, or a nesting beyond Python's limit
        raise RowError(f"expected a JSON object, found invalid JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"expected a JSON object, found {_describe(row)}")
    return row


def parse_task(row: Mapping[str, Any], fields: FieldMap) -> Task:
    """The task of a row, with a step limit of 0. Raises RowError."""
    values = {field: _value(row, fields, field) for field in TASK_FIELDS}
    texts = {field: _text(*values[field], field in fields.required) for field in _TEXT_FIELDS}
    facts = _facts(*values["facts"], "facts" in fields.required)
    difficulty, fact_count = _difficulty(*values["difficulty"], "difficulty" in fields.required, len(facts))
    name, identifier = values["id"]
    try:
        url, website = parse_website(texts["website"])
    except ValueError:
        raise _unexpected(values["website"][0], EXPECTED, values["website"][1]) from None
    return Task(
        id=str(identifier) if _is_number(identifier, int) else _text(name, identifier, required=True),
        source=SOURCE_NAME,
        environment=environment_name(texts["domain"]),
        seed=0,
        max_steps=0,
        instruction=texts["instruction"],
        difficulty=difficulty,
        answer=_answer(row, fields.names.get("answer", ())),
        url=url,
        website=website,
        benchmark=texts["benchmark"] or fields.benchmark,
        domain=texts["domain"],
        subdomain=texts["subdomain"],
        fact_count=fact_count,
        facts=facts,
    )


@functools.lru_cache(maxsize=1024)
def environment_name(domain: str) -> str:
    """The name of a domain in metrics: lower case letters and digits, with hyphens between."""
    return _NOT_IN_NAMES.sub("-", domain.lower()).strip("-") or ENVIRONMENT_NAME


def difficulty_of(fact_count: int) -> str:
    """The level of an integer difficulty, which is the number of facts."""
    return next((name for name, most in MOST_FACTS.items() if fact_count <= most), DIFFICULTIES[-1])


def _value(row: Mapping[str, Any], fields: FieldMap, field: str) -> tuple[str, Any]:
    """Name and value of the field of a row that holds a field of the task."""
    if field not in fields.names:
        return field, _MISSING
    name = fields.names[field][0]
    value = row.get(name, _MISSING)
    if value is _MISSING and field in fields.named:
        raise _unexpected(name, "a value or null, because tasks.fields names it", value)
    return name, value


def _text(name: str, value: Any, required: bool) -> str:
    """The text without surrounding space; empty without one that is required."""
    if isinstance(value, str):
        text = value.strip()
        if not text.isascii() and (half := _SURROGATE.search(text)):
            place = half.start() + 1
            raise RowError(f"field {name}: expected text, found half of a surrogate pair at character {place}")
        if text or not required:
            return text
        raise _unexpected(name, "text that is not empty", value)
    if required or value not in (None, _MISSING):
        raise _unexpected(name, "text", value)
    return ""


def _answer(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Text, or a number as Python writes it (12.50 is "12.5"); None without one. Fields that have one agree."""
    first, answer = "", ""
    for name in names:
        value = row.get(name)
        text = json.dumps(value) if _is_number(value, int | float) else _text(name, value, required=False)
        if text and answer not in ("", text):
            raise _unexpected(name, f"the answer of {first}, {_describe(answer)}", value)
        first, answer = (name, text) if text else (first, answer)
    return answer or None


def _difficulty(name: str, value: Any, required: bool, facts: int) -> tuple[str, int]:
    """Level, and number of facts (0: not given). By the facts of a row that names no difficulty."""
    if value in (None, _MISSING) and not required:
        return (difficulty_of(facts), facts) if facts else (DEFAULT_DIFFICULTY, 0)
    if isinstance(value, str) and value.strip().lower() in DIFFICULTIES:
        return value.strip().lower(), 0
    if not _is_number(value, int) or not 0 <= value <= MAX_DIFFICULTY:
        expected = f"an integer from 0 to {MAX_DIFFICULTY}, or one of {', '.join(DIFFICULTIES)}"
        raise _unexpected(name, expected, value)
    return difficulty_of(value), value


def _facts(name: str, value: Any, required: bool) -> tuple[RubricFact, ...]:
    """The facts of all groups. Legacy rows hold texts, or a description, in place of groups with facts."""
    if value in (None, _MISSING, "", []) and not required:
        return ()
    groups = [value] if isinstance(value, str) and value else value
    if not isinstance(groups, list) or not groups:
        raise _unexpected(name, "a list of {id, description, facts}, not empty", value)
    return tuple(
        fact for index, group in enumerate(groups) for fact in _facts_of_group(f"{name}[{index}]", index, group)
    )


def _facts_of_group(place: str, index: int, group: Any) -> list[RubricFact]:
    if isinstance(group, str):
        return [RubricFact(str(index + 1), "", _text(place, group, required=True))]
    if not isinstance(group, dict):
        raise _unexpected(place, "{id, description, facts} or text", group)
    key, facts = group.get("id"), group.get("facts")
    if not isinstance(key, str | int | None) or isinstance(key, bool):
        raise _unexpected(f"{place}.id", "text or an integer", key)
    key = str(index + 1) if key in (None, "") else str(key)
    if facts is None:
        others = [name for name, value in group.items() if value is not None and name not in ("id", "description")]
        if others:
            found = ", ".join(map(_describe, others))
            raise RowError(f"field {place}: expected the key facts, or only id and description, found {found}")
    description = _text(f"{place}.description", group.get("description", _MISSING), required=facts is None)
    if facts is None:
        return [RubricFact(key, "", description)]
    if not isinstance(facts, list) or not facts:
        raise _unexpected(f"{place}.facts", "a list of texts, not empty", facts)
    return [
        RubricFact(key, description, _text(f"{place}.facts[{number}]", fact, required=True))
        for number, fact in enumerate(facts)
    ]


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _unexpected(name: str, expected: str, value: Any) -> RowError:
    return RowError(f"field {name}: expected {expected}, found {_describe(value)}")


def _describe(value: Any) -> str:
    return "nothing" if value is _MISSING else shorten(json.dumps(value), _FOUND_CHARACTERS)
