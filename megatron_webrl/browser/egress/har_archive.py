"""Files of recorded episodes: one ZIP for each visit of a task, `<har_name>.<visit>.zip`.

A file holds the HAR of the visit (`visit.har`), the bodies that it names, and `visit.json` with what replay needs
besides. It contains every response, with cookies and tokens; of requests it has only the headers that replay reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from megatron_webrl.browser.errors import NotRecorded
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.types import Task

FORMAT = 1
HAR_MEMBER, VISIT_MEMBER = "visit.har", "visit.json"
MAX_NAME = 80  # characters of a task id in a file name
FAILED_STATUS = 0  # there was no response
READ_REQUEST_HEADERS = frozenset({"host", ":authority", "range", "content-length"})  # others are not needed
UNKNOWN_BODY = "unknown"  # in place of a digest
NOT_MODIFIED = 304
_BODILESS = frozenset({204, 205})  # and redirects: their bodies are not shown
_BOUNDARY = re.compile(r'boundary="?([^";]+)')
_UNSAFE = re.compile(r"""[ "'<>\\^`{|}]""")  # some URL parsers escape these, others do not


@dataclass(frozen=True)
class RequestKey:
    """Requests with equal keys are the same request."""

    method: str
    url: str  # without fragment
    byte_range: str  # value of the Range header, or empty
    body: str  # digest, or UNKNOWN_BODY


@dataclass(frozen=True)
class RecordedResponse:
    """A response of a visit; `read_body` of its visit returns the body."""

    status: int  # or FAILED_STATUS
    reason: str
    headers: tuple[tuple[str, str], ...]
    body_file: str | None  # member of the ZIP; None: no body
    visit: int
    given_up: bool = False  # the page did not wait for the end of the body, or, with FAILED_STATUS, for any response

    @property
    def complete(self) -> bool:
        return self.status != FAILED_STATUS and not self.given_up


@dataclass(frozen=True)
class Exchange:
    """A request of a visit and its response."""

    key: RequestKey
    content_type: str  # of the request
    body: bytes | None  # of the request; None: unknown
    response: RecordedResponse


class Visit:
    """An open file of a visit. `close` closes it."""

    def __init__(self, path: Path, number: int) -> None:
        """Raises NotRecorded for a file that is missing or damaged."""
        self._path, self._number = path, number
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise self._unreadable(error) from error
        try:
            visit = json.loads(self._zip.read(VISIT_MEMBER))
            if visit["format"] != FORMAT:
                raise ValueError(f"format {visit['format']} is not {FORMAT}")
            self.clock_ms = int(visit["clock_ms"])  # unix time of the visit, milliseconds
            self.exchanges = self._read_exchanges()
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            self._zip.close()
            raise self._unreadable(error) from error

    def read_body(self, response: RecordedResponse) -> bytes:
        """The body of a response of this visit. Raises NotRecorded for a damaged file."""
        if response.body_file is None:
            return b""
        try:
            return self._zip.read(response.body_file)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise self._unreadable(error) from error

    def close(self) -> None:
        self._zip.close()

    def _read_exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges in the order of the requests.

        A replay's browser has a cache of its own: a response that came from the cache counts only if no complete
        response of a server to the same request was recorded.
        """
        latest: dict[RequestKey, RecordedResponse] = {}
        served: set[RequestKey] = set()  # by a server
        found: list[tuple[bool, Exchange]] = []  # with: not from the cache
        for entry in json.loads(self._zip.read(HAR_MEMBER))["log"]["entries"]:
            request = entry["request"]
            posted = request.get("postData") or {}
            headers = {each["name"].lower(): each["value"] for each in request["headers"]}
            sent = "host" in headers or ":authority" in headers
            # DevTools omit a body that has a Blob or a file in it.
            body = None if int(headers.get("content-length", 0)) and not posted else b""
            body = self._zip.read(posted["_file"]) if "_file" in posted else body
            content_type = posted.get("mimeType", "")
            key = request_key(request["method"], request["url"], content_type, body, headers.get("range", ""))
            response = _recorded_response(entry["response"], self._number)
            if response is not None and response.status == NOT_MODIFIED:
                response = latest.get(key)  # the browser showed its copy of the previous response
            if response is not None:
                if response.complete:
                    latest[key] = response
                if response.complete and sent:
                    served.add(key)
                found.append((sent or response.status == FAILED_STATUS, Exchange(key, content_type, body, response)))
        return tuple(exchange for counts, exchange in found if counts or exchange.key not in served)

    def _unreadable(self, error: Exception) -> NotRecorded:
        return NotRecorded(
            f"{self._path} cannot be read: {type(error).__name__}: {error}; remove it and record the task again"
        )


def check_har_settings(settings: BrowserConfig) -> None:
    """Raises ConfigError for an unusable folder."""
    if settings.replay and not Path(settings.replay).is_dir():
        raise ConfigError(f"browser.replay={settings.replay} is not a folder; record one with browser.record")
    if settings.record:
        try:
            Path(settings.record).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=settings.record).close()
        except OSError as error:
            raise ConfigError(f"browser.record={settings.record} cannot be written: {error.strerror}") from error


def har_name(task: Task) -> str:
    """File name of a task: its id with unsafe characters replaced, and a digest of the id."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", task.id)[:MAX_NAME].strip("_")
    return f"{plain}-{hashlib.blake2b(task.id.encode(), digest_size=6).hexdigest()}"


def visit_path(folder: Path, task: Task, visit: int) -> Path:
    return folder / f"{har_name(task)}.{visit}.zip"


def open_visits(folder: Path, task: Task) -> list[Visit]:
    """All visits of a task, in the order of their numbers. Raises NotRecorded if there is none, or one is damaged."""
    visits: list[Visit] = []
    try:
        while (path := visit_path(folder, task, len(visits))).is_file():
            visits.append(Visit(path, len(visits)))
    except NotRecorded:
        for visit in visits:
            visit.close()
        raise
    if not visits:
        name = visit_path(folder, task, 0).name
        raise NotRecorded(f"{task.id} has no archive {name} in {folder} (browser.replay); record it first")
    return visits


def request_key(method: str, url: str, content_type: str, body: bytes | None, byte_range: str = "") -> RequestKey:
    """Key of a request; the random boundary of multipart forms is ignored. Body None: unknown."""
    digest = UNKNOWN_BODY
    if body is not None:
        if match := _BOUNDARY.search(content_type):
            body = body.replace(match[1].encode(), b"boundary")
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    plain = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", urldefrag(url).url)
    return RequestKey(method, plain, byte_range, digest)


def _recorded_response(response: Mapping[str, Any], visit: int) -> RecordedResponse | None:
    """None: it was not recorded, because its body was lost."""
    status, content = response["status"], response.get("content", {})
    failure = response.get("_failureText", "")
    if status <= 0:  # without a failure: the visit ended first
        given_up = not failure or "ERR_ABORTED" in failure
        return RecordedResponse(FAILED_STATUS, "", (), None, visit, given_up)
    headers = tuple((each["name"].lower(), each["value"]) for each in response["headers"])
    fields = dict(headers)
    if fields.get("content-type", "").startswith("text/event-stream"):
        return RecordedResponse(204, "No Content", (), None, visit)  # a stream never ends; 204 tells pages not to retry
    if status < 200:
        return None  # a WebSocket
    # An empty body that the page does not read counts as given up in Chromium.
    bodiless = status in _BODILESS or 300 <= status < 400 or fields.get("content-length") == "0"
    given_up = "_file" not in content and not bodiless
    if given_up and "ERR_ABORTED" not in failure:
        return None
    return RecordedResponse(status, response.get("statusText", ""), headers, content.get("_file"), visit, given_up)
