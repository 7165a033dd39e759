"""Rows of task files: fields, websites, checks.

Rows of a task file: one line becomes a task, or an error that names the field, what was expected and what is there.

A row is never half-read: a field that a task has and a row gives must fit, whichever field it is.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


class StartPage(NamedTuple):
    """Where a task begins."""

    url: str
    website: str  # its host: lower case, A-labels, without a leading "www."


@functools.lru_cache(maxsize=4096)
def parse_website(text: str) -> StartPage:
    """The start page that a field `website` names; without a scheme it is https, for local hosts http. Raises
    ValueError.
    """
    text = text.strip()
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3] or 443) < 65536:
        raise ValueError(text)
    host = _canonical_host(match[2].removesuffix("."))
    website = host.removeprefix("www.")
    website = website if "." in website else host
    scheme = "https" if is_public(website) else "http"
    return StartPage(text if match[1] else f"{scheme}://{text}", website)


def is_public(website: str) -> bool:
    """Whether the pages of a website come from the network."""
    return website != LOCAL_SUFFIX[1:] and not website.endswith(LOCAL_SUFFIX)


def _canonical_host(host: str) -> str:
    if not host.isascii():
        import idna  # of the browsers' extra; few hosts need it

        host = idna.encode(idna.uts46_remap(host, std3_rules=False, transitional=False)).decode()
    host = host.lower()
    if len(host) > 253 or not (_HOST.fullmatch(host) or host == LOCAL_SUFFIX[1:]):
        raise ValueError(host)
    return host


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


MOST_FACTS = {"easy": 3, "medium": 6}  # of a difficulty; hard has more
DEFAULT_DIFFICULTY = "medium"  # of rows with neither difficulty nor facts
MAX_DIFFICULTY = 1000
MAX_LINE_BYTES = 16 * 2**20
_MISSING = object()
_FOUND_CHARACTERS = 60
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


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
    values = _Values(row, fields)
    facts = values.facts()
    difficulty, fact_count = values.difficulty(len(facts))
    start = values.start_page()
    domain = values.text("domain")
    return Task(
        id=values.identifier(),
        source=SOURCE_NAME,
        environment=environment_name(domain),
        seed=0,
        max_steps=0,
        instruction=values.text("instruction"),
        difficulty=difficulty,
        answer=values.answer(),
        url=start.url,
        website=start.website,
        benchmark=values.text("benchmark") or fields.benchmark,
        domain=domain,
        subdomain=values.text("subdomain"),
        fact_count=fact_count,
        facts=facts,
    )


def environment_name(domain: str) -> str:
    """The name of a domain in metrics: lower case letters and digits, with hyphens between."""
    return _NOT_IN_NAMES.sub("-", domain.lower()).strip("-") or ENVIRONMENT_NAME


def difficulty_of(fact_count: int) -> str:
    """The level of an integer difficulty, which is the number of facts."""
    return next((name for name, most in MOST_FACTS.items() if fact_count <= most), DIFFICULTIES[-1])


class _Values:
    """The fields of one row, checked as they are read. Methods raise RowError."""

    def __init__(self, row: Mapping[str, Any], fields: FieldMap) -> None:
        self._row, self._fields = row, fields

    def identifier(self) -> str:
        """Text, or an integer, which some benchmarks count by."""
        name, value = self._get("id")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return _checked_text(name, value, required=True)

    def text(self, field: str) -> str:
        """Text without surrounding space; empty for a row without it."""
        name, value = self._get(field)
        return _checked_text(name, value, field in self._fields.required)

    def start_page(self) -> StartPage:
        name, value = self._get("website")
        try:
            return parse_website(_checked_text(name, value, required=True))
        except RowError:
            raise
        except ValueError:
            raise _unexpected(name, EXPECTED, value) from None

    def answer(self) -> str | None:
        """Text, or a number as Python writes it (12.50 is "12.5"); None without one. Fields that have one agree."""
        self._get("answer")  # raises for a row without a field that tasks.fields names
        found = ("", "")
        for name in self._fields.names.get("answer", ()):
            value = self._row.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            text = json.dumps(value) if is_number else _checked_text(name, value, required=False)
            if text and found[1] not in ("", text):
                raise _unexpected(name, f"the answer of {found[0]}, {_describe(found[1])}", value)
            found = (name, text) if text else found
        return found[1] or None

    def difficulty(self, facts: int) -> tuple[str, int]:
        """Level, and number of facts (0: not given). By the facts of a row that names no difficulty."""
        name, value = self._get("difficulty")
        if value in (None, _MISSING) and "difficulty" not in self._fields.required:
            return (difficulty_of(facts), facts) if facts else (DEFAULT_DIFFICULTY, 0)
        if isinstance(value, str) and value.strip().lower() in DIFFICULTIES:
            return value.strip().lower(), 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DIFFICULTY:
            expected = f"an integer from 0 to {MAX_DIFFICULTY}, or one of {', '.join(DIFFICULTIES)}"
            raise _unexpected(name, expected, value)
        return difficulty_of(value), value

    def facts(self) -> tuple[RubricFact, ...]:
        """The facts of all groups. Legacy rows hold texts, or a description, in place of groups with facts."""
        name, value = self._get("facts")
        if value in (None, _MISSING, "", []) and "facts" not in self._fields.required:
            return ()
        groups = [value] if isinstance(value, str) and value else value
        if not isinstance(groups, list) or not groups:
            raise _unexpected(name, "a list of {id, description, facts}, not empty", value)
        return tuple(fact for number, group in enumerate(groups, 1) for fact in _facts_of_group(name, number, group))

    def _get(self, field: str) -> tuple[str, Any]:
        """Name and value of the first field of the row that holds a field of the task."""
        names = self._fields.names.get(field, ())
        for name in names:
            if self._row.get(name) is not None:
                return name, self._row[name]
        name = names[0] if names else field
        if any(other in self._row for other in names):
            return name, None
        if field in self._fields.named:
            raise _unexpected(name, "a value or null, because tasks.fields names it", _MISSING)
        return name, _MISSING


def _facts_of_group(name: str, number: int, group: Any) -> Iterator[RubricFact]:
    place = f"{name}[{number - 1}]"
    if isinstance(group, str):
        yield RubricFact(str(number), "", _checked_text(place, group, required=True))
        return
    if not isinstance(group, dict):
        raise _unexpected(place, "{id, description, facts} or text", group)
    identifier = group.get("id")
    if not isinstance(identifier, str | int | None) or isinstance(identifier, bool):
        raise _unexpected(f"{place}.id", "text or an integer", identifier)
    key = str(number) if identifier is None or identifier == "" else str(identifier)
    facts = group.get("facts")
    others = [key for key, other in group.items() if other is not None and key not in ("id", "description")]
    if facts is None and others:
        found = ", ".join(map(_describe, others))
        raise RowError(f"field {place}: expected the key facts, or only id and description, found {found}")
    description = _checked_text(f"{place}.description", group.get("description", _MISSING), required=facts is None)
    if facts is None:
        yield RubricFact(key, "", description)
        return
    if not isinstance(facts, list) or not facts:
        raise _unexpected(f"{place}.facts", "a list of texts, not empty", facts)
    for index, fact in enumerate(facts):
        yield RubricFact(key, description, _checked_text(f"{place}.facts[{index}]", fact, required=True))


def _checked_text(name: str, value: Any, required: bool) -> str:
    """The text without surrounding space. Raises RowError."""
    if isinstance(value, str) and value.isascii() and (text := value.strip()):
        return text  # as nearly all are
    if value in (None, _MISSING) and not required:
        return ""
    if not isinstance(value, str):
        raise _unexpected(name, "text", value)
    text = value.strip()
    if required and not text:
        raise _unexpected(name, "text that is not empty", value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"field {name}: expected text, found half of a surrogate pair at character {error.start + 1}"
            ) from None
    return text


def _unexpected(name: str, expected: str, value: Any) -> RowError:
    return RowError(f"field {name}: expected {expected}, found {_describe(value)}")


def _describe(value: Any) -> str:
    return "nothing" if value is _MISSING else shorten(json.dumps(value), _FOUND_CHARACTERS)
