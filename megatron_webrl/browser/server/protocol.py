"""HTTP messages of browser server and client, under API_PREFIX. From status 400 on they are `ErrorResponse`."""

from __future__ import annotations

import dataclasses
import functools
import struct
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import COORDINATE_RANGE, Action, Observation, Task

API_PREFIX = "/v1"
TOKEN_VARIABLE = "WEBRL_BROWSERS_TOKEN"  # environment variable that holds the clients' token
CA_VARIABLE = "WEBRL_BROWSERS_CA"  # PEM file of the issuers that clients of https:// addresses trust
OBSERVATION_MEDIA_TYPE = "application/vnd.webrl.observation"
"""Length of the JSON (uint32, little endian), JSON, image; other clients request the image separately."""
_LENGTH = struct.Struct("<I")
LEASE_SECONDS, MAX_LEASE_SECONDS = 60.0, 3600.0

STATUS_NOT_FOUND, STATUS_CONFLICT = 404, 409
STATUS_LEASE_EXPIRED = 410  # or the lease is unknown
STATUS_BROWSER_FAILED = 502  # `ErrorResponse.outcome` names the failure
STATUS_BUSY = 503  # retry after `Retry-After` seconds

SessionState = Literal["idle", "resetting", "waiting", "acting", "crashed"]
"""State of a lease: no episode; a reset runs; the server waits for the client; a step runs; the browser has failed."""

_STRICT = ConfigDict(extra="forbid")  # an unknown field is an error, not silently ignored
Point = tuple[Annotated[int, Field(ge=0, le=COORDINATE_RANGE)], Annotated[int, Field(ge=0, le=COORDINATE_RANGE)]]
OwnerLine = Annotated[str, Field(max_length=200, pattern=r"^\P{C}*$")]  # no control characters
T = TypeVar("T")
with_config(ConfigDict(ser_json_inf_nan="strings"))(Observation)  # a reward may be no finite number


class ProtocolError(ValueError):
    """Bytes or JSON that do not follow the protocol."""


class InvalidRequest(ValueError):
    """A request with an invalid value; the message begins with the field."""


@dataclass(frozen=True)
class ErrorResponse:
    """The reason why a request was rejected or failed."""

    error: str  # one sentence
    outcome: str | None = None  # of a browser failure; masks the episode, such as "page_crashed"


@dataclass(frozen=True)
class LeaseRequest:
    """Request one browser session, held until it is released or expires."""

    __pydantic_config__ = _STRICT
    seconds: Annotated[float, Field(gt=0, le=MAX_LEASE_SECONDS)] = LEASE_SECONDS  # lifetime without renewal
    owner: OwnerLine = ""  # shown on the server's status page


@dataclass(frozen=True)
class Lease:
    """The right to one session on one browser server. Each use and each renewal restarts its lifetime."""

    id: str
    seconds: float  # until it expires unless renewed
    free: int  # sessions of the server without a lease, by which clients choose the server of their next one


@dataclass(frozen=True)
class ResetRequest:
    """The task to open: a complete task, or environment and seed of a source, or a web page."""

    __pydantic_config__ = _STRICT
    task: Task | None = None
    source: str | None = None
    environment: str | None = None
    seed: int = 0
    url: str | None = None
    instruction: str | None = None


@dataclass(frozen=True)
class SessionSpec:
    """What the sessions of a browser server show and can do: its settings `browser.*` of the same names."""

    width: int
    height: int
    screenshot: str
    marks: bool
    actions: tuple[str, ...]

    @classmethod
    def from_config(cls, settings: BrowserConfig) -> SessionSpec:
        """The spec of a server with these settings."""
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)}
        return cls(**values | {"actions": tuple(sorted(settings.actions))})

    def differences(self, expected: SessionSpec) -> str:
        """The settings that differ from `expected`, as text; empty if none does."""
        names = [field.name for field in dataclasses.fields(self)]
        values = [(name, getattr(self, name), getattr(expected, name)) for name in names]
        return ", ".join(f"browser.{name}={have} instead of {want}" for name, have, want in values if have != want)


@dataclass(frozen=True)
class StepRequest(Action):
    """An action to execute, with the fields of `types.Action`."""

    __pydantic_config__ = _STRICT
    coordinate: Point | None = None
    end_coordinate: Point | None = None


@dataclass(frozen=True)
class LeaseState:
    """State of a granted lease."""

    state: SessionState
    seconds_left: float  # until it expires unless used or renewed
    owner: str
    task: Task | None = None  # of the latest episode
    url: str | None = None  # of the latest observation, as is the title
    title: str | None = None
    steps: int = 0
    outcome: str | None = None  # name of the browser failure, if there was one
    refused_requests: dict[str, int] = field(default_factory=dict)  # requests of the episode's pages, by reason
    cdp_address: str | None = (
        None  # with browser.cdp: http://host:port of the episode's Chromium, on the server's machine
    )


@dataclass(frozen=True)
class TaskList:
    """Available environments by source."""

    sources: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ServerState:
    """State of a browser server."""

    sessions: int  # maximum number of leases
    free: int
    spec: SessionSpec
    leases: tuple[str, ...] = ()


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def dump(value: Any) -> bytes:
    """A dataclass of this module or of `types` as JSON, an observation without its screenshot."""
    return _adapter(cast(Any, type(value))).dump_json(value, exclude={"screenshot"})


def load(kind: type[T], text: bytes) -> T:
    """Parse JSON into a value. Raises ProtocolError that names the field."""
    try:
        return _adapter(cast(Any, kind)).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "body"
        raise ProtocolError(f"{location}: {first['msg']}") from error


def encode_observation(observation: Observation) -> bytes:
    """An observation with its screenshot, of OBSERVATION_MEDIA_TYPE."""
    text = dump(observation)
    return b"".join((_LENGTH.pack(len(text)), text, observation.screenshot))


def decode_observation(body: bytes) -> Observation:
    """Parse a body of OBSERVATION_MEDIA_TYPE. Raises ProtocolError."""
    end = _LENGTH.size + (_LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else 0)
    if len(body) < end:
        raise ProtocolError(f"observation of {len(body)} bytes announces {end} bytes before its image")
    fields = load(dict[str, Any], body[_LENGTH.size : end])
    try:
        return _adapter(Observation).validate_python(fields | {"screenshot": body[end:]})
    except ValidationError as error:
        raise ProtocolError(f"observation: {error.errors()[0]['msg']}") from error
