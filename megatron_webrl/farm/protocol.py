"""What node, router and client say to each other over HTTP: JSON, and frames of JSON with a screenshot.

Every path begins with PREFIX. A refusal is a status of 400 and more with an `Error` as its body.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Action, Observation, Task

API_PREFIX = "/v1"
TOKEN_VARIABLE = "WEBRL_BROWSERS_TOKEN"
"""Environment variable with the token, sent as `Authorization: Bearer TOKEN`."""

OBSERVATION_MEDIA_TYPE = "application/vnd.webrl.observation"
"""Media type of an observation with its screenshot: length of the JSON (uint32, little endian), JSON, image.

Sent where the client accepts it; others get the JSON alone and ask for the screenshot.
"""
_LENGTH = struct.Struct("<I")

STATUS_BUSY, STATUS_LEASE_EXPIRED, STATUS_BROWSER_FAILED = 503, 410, 502
"""Statuses that mean something to a client: try again after `Retry-After` seconds; the lease is not or no longer
known; the browser failed, `Error.outcome` names how."""

SessionState = Literal["idle", "resetting", "waiting", "acting", "crashed"]
"""Of a lease: no episode, an operation of one kind or the other, the client's turn, the browser has failed."""

_NOTHING_ELSE = ConfigDict(extra="forbid")  # a field that is not known is an error, not something left undone
T = TypeVar("T")


class ProtocolError(ValueError):
    """Bytes or JSON that are not what they should be."""


@dataclass(frozen=True)
class ErrorResponse:
    """Why a request was refused or failed."""

    error: str  # one sentence
    outcome: str | None = None  # of a browser's failure: what masks the episode, such as "page_crashed"


@dataclass(frozen=True)
class LeaseRequest:
    """Ask for one browser session at a time, until released or expired."""

    __pydantic_config__ = _NOTHING_ELSE

    seconds: float | None = None  # lifetime without renewal; None: the node's default
    owner: str = ""  # for people who read the node's list


@dataclass(frozen=True)
class Lease:
    """The right to one session on one node. Whatever is done with it, and each renewal, begins its life anew."""

    id: str
    seconds: float  # until it expires unless renewed
    server: str  # address of the node, such as http://node7:8700: where the lease is used


@dataclass(frozen=True)
class ResetRequest:
    """Which task to open: a whole one, or environment and seed of a source, or a page of the web."""

    __pydantic_config__ = _NOTHING_ELSE

    task: Task | None = None
    source: str | None = None
    environment: str | None = None
    seed: int = 0
    url: str | None = None
    instruction: str | None = None


@dataclass(frozen=True)
class SessionSpec:
    """What the sessions of a node show and can do: its settings browser.* of these names."""

    width: int
    height: int
    screenshot: str
    quality: int
    marks: bool
    max_marks: int
    actions: tuple[str, ...]
    tabs: int

    @classmethod
    def from_config(cls, settings: BrowserConfig) -> SessionSpec:
        """Those of a node with these settings."""
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)}
        return cls(**values | {"actions": tuple(sorted(settings.actions))})

    def differences(self, expected: SessionSpec) -> str:
        """Each setting that is another one than expected; empty if there is none."""
        names = [field.name for field in dataclasses.fields(self)]
        found = [(name, getattr(self, name), getattr(expected, name)) for name in names]
        return ", ".join(f"browser.{name}={have} instead of {want}" for name, have, want in found if have != want)


@dataclass(frozen=True)
class StepRequest(Action):
    """An action to carry out, with the fields of `types.Action`."""

    __pydantic_config__ = _NOTHING_ELSE


@dataclass(frozen=True)
class LeaseState:
    """What a node knows of a lease that it has given."""

    state: SessionState
    seconds_left: float  # until it expires unless used or renewed
    owner: str
    task: Task | None = None  # of the latest episode
    url: str | None = None  # of its latest observation, and so the title
    title: str | None = None
    steps: int = 0
    outcome: str | None = None  # how the browser failed, if it did
    refused_requests: dict[str, int] = field(default_factory=dict)  # requests of the episode's pages, by reason


@dataclass(frozen=True)
class TaskList:
    """What can be opened: environments by source."""

    sources: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ServerState:
    """What a node says of itself, to a router every few seconds and to anyone who asks."""

    url: str
    instance_id: str  # another one each time that the node starts
    sessions: int  # that may be leased at a time
    free: int
    spec: SessionSpec
    leases: tuple[str, ...] = ()
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # environments by source


@dataclass(frozen=True)
class RegisteredServer:
    """What a router knows of a node."""

    url: str
    instance_id: str
    alive: bool
    heartbeat_age_seconds: float  # since it last announced itself
    sessions: int
    free: int  # as announced, less what was placed since
    leases: tuple[str, ...] = ()


@dataclass(frozen=True)
class RouterState:
    """What a router says of itself; sessions, free places and leases are those of live nodes."""

    sessions: int
    free: int
    leases: int
    servers: tuple[RegisteredServer, ...]


task_adapter, action_adapter = TypeAdapter(Task), TypeAdapter(Action)
_observation_adapter = TypeAdapter(Observation)
_fields = TypeAdapter(dict[str, Any])


def dump(value: Any) -> bytes:
    """A dataclass of this module or of `types` as JSON; not for observations."""
    return _adapter(cast(Any, type(value))).dump_json(value)


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def load(adapter: TypeAdapter[T], text: bytes) -> T:
    """The value in JSON. Raises WireError that names the field."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise ProtocolError(f"{place}: {first['msg']}") from error


def observation_json(observation: Observation) -> bytes:
    """An observation without its screenshot."""
    return _observation_adapter.dump_json(dataclasses.replace(observation, screenshot=b""), exclude={"screenshot"})


def encode_observation(observation: Observation) -> bytes:
    """An observation with its screenshot, of media type FRAME."""
    text = observation_json(observation)
    return b"".join((_LENGTH.pack(len(text)), text, observation.screenshot))


def decode_observation(body: bytes) -> Observation:
    """The observation in a frame. Raises WireError."""
    if len(body) < _LENGTH.size:
        raise ProtocolError(f"a frame of {len(body)} bytes")
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    if len(body) < end:
        raise ProtocolError(f"a frame of {len(body)} bytes speaks of {length} bytes of JSON")
    seen = load(_fields, body[_LENGTH.size : end])
    try:
        return _observation_adapter.validate_python(seen | {"screenshot": body[end:]})
    except ValidationError as error:
        raise ProtocolError(f"observation: {error.errors()[0]['msg']}") from error
