"""Record what episodes fetch, and answer their requests from these recordings.

Each visit of a task is a ZIP file, `<har_name>.<visit>.zip`: the HAR (`visit.har`), the bodies that it names, and
`visit.json` with what else replay needs. It contains every response, with cookies and tokens; of requests it has only
the headers that replay reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urldefrag, urlencode, urlsplit, urlunsplit

from playwright.async_api import BrowserContext

from megatron_webrl.browser.errors import NotRecorded
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
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
HOP_BY_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te", "upgrade"}
)
FRAMING_HEADERS = frozenset({"content-length", "transfer-encoding"})
FORM_TYPE = "application/x-www-form-urlencoded"
# Bodies are replayed decoded and unframed. The other headers make the browser contact servers outside of any page.
_DROPPED_HEADERS = (
    FRAMING_HEADERS | HOP_BY_HOP_HEADERS | {"content-encoding", "alt-svc", "nel", "report-to", "reporting-endpoints"}
)
_HEAD_HEADERS = frozenset({"content-length", "content-encoding"})  # kept in a response to HEAD, which has no body
_DATES = frozenset({"date", "expires", "last-modified"})  # they decide how long the browser's cache keeps a response
_EXPIRES = re.compile(r"(;\s*expires\s*=\s*)([^;]+)", re.IGNORECASE)


class RequestKey(NamedTuple):
    """Requests with equal keys are the same request."""

    method: str
    url: str  # without fragment
    byte_range: str  # value of the Range header, or empty
    body: str  # digest, or UNKNOWN_BODY


@dataclass(frozen=True)
class RecordedResponse:
    """A response of a visit, and with `body` one that is ready to be sent."""

    status: int  # FAILED_STATUS: the request got no response
    reason: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    stored: tuple[Path, str] | None = None  # where the body is: file of the visit, member; None: no body
    given_up: bool = False  # the page did not wait for the end of the body, or, with FAILED_STATUS, for any response
    body: bytes = b""  # once it is read

    @property
    def complete(self) -> bool:
        return self.status != FAILED_STATUS and not self.given_up


@dataclass(frozen=True)
class ReplayRequest:
    """A request of a page, as a visit recorded it or the proxy received it."""

    method: str
    url: str
    content_type: str = ""
    body: bytes | None = b""  # None: unknown
    byte_range: str = ""  # value of the Range header, or empty

    @cached_property
    def key(self) -> RequestKey:
        """The random boundary of multipart forms is ignored."""
        digest, body = UNKNOWN_BODY, self.body
        if body is not None:
            if match := _BOUNDARY.search(self.content_type):
                body = body.replace(match[1].encode(), b"boundary")
            digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        url = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", urldefrag(self.url).url)
        return RequestKey(self.method, url, self.byte_range, digest)


Exchange = tuple[ReplayRequest, RecordedResponse]


@dataclass(frozen=True)
class Visit:
    """What a file says of a visit, without the bodies of responses."""

    clock_ms: int  # unix time of the visit, milliseconds
    exchanges: tuple[Exchange, ...]  # in the order of the requests


@contextmanager
def _opened_visit(path: Path) -> Iterator[zipfile.ZipFile]:
    """The file of a visit. Raises NotRecorded for one that is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = f"{type(error).__name__}: {error}"
        raise NotRecorded(f"{path} cannot be read: {reason}; remove it and record the task again") from error


def read_visit(path: Path) -> Visit:
    """Read a visit. Raises NotRecorded for a file that is missing or damaged."""
    with _opened_visit(path) as file:
        visit = json.loads(file.read(VISIT_MEMBER))
        if visit["format"] != FORMAT:
            raise ValueError(f"format {visit['format']} is not {FORMAT}")
        return Visit(int(visit["clock_ms"]), _read_exchanges(file, path))


def _read_exchanges(file: zipfile.ZipFile, path: Path) -> tuple[Exchange, ...]:
    """A replay's browser has a cache of its own: a response that came from the cache counts only if no complete
    response of a server to the same request was recorded.
    """
    latest: dict[RequestKey, RecordedResponse] = {}
    served: set[RequestKey] = set()  # by a server
    found: list[tuple[bool, Exchange]] = []  # with: not from the cache
    for entry in json.loads(file.read(HAR_MEMBER))["log"]["entries"]:
        sent_request = entry["request"]
        posted = sent_request.get("postData") or {}
        headers = {each["name"].lower(): each["value"] for each in sent_request["headers"]}
        sent = "host" in headers or ":authority" in headers
        # DevTools omit a body that has a Blob or a file in it.
        body = None if int(headers.get("content-length", 0)) and not posted else b""
        body = file.read(posted["_file"]) if "_file" in posted else body
        kind, byte_range = posted.get("mimeType", ""), headers.get("range", "")
        request = ReplayRequest(sent_request["method"], sent_request["url"], kind, body, byte_range)
        key = request.key
        response = _recorded_response(entry["response"], path)
        if response is not None and response.status == NOT_MODIFIED:
            response = latest.get(key)  # the browser showed its copy of the previous response
        if response is not None:
            if response.complete:
                latest[key] = response
            if response.complete and sent:
                served.add(key)
            found.append((sent or response.status == FAILED_STATUS, (request, response)))
    return tuple(exchange for counts, exchange in found if counts or exchange[0].key not in served)


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


def read_visits(folder: Path, task: Task) -> list[Visit]:
    """All visits of a task, in the order of their numbers. Raises NotRecorded if there is none, or one is damaged."""
    visits: list[Visit] = []
    while (path := visit_path(folder, task, len(visits))).is_file():
        visits.append(read_visit(path))
    if not visits:
        raise NotRecorded(f"{task.id} has no archive {path.name} in {folder} (browser.replay); record it first")
    return visits


def _recorded_response(response: Mapping[str, Any], archive: Path) -> RecordedResponse | None:
    """None: it was not recorded, because its body was lost."""
    status, content = response["status"], response.get("content", {})
    failure = response.get("_failureText", "")
    if status <= 0:  # without a failure: the visit ended first
        given_up = not failure or "ERR_ABORTED" in failure
        return RecordedResponse(FAILED_STATUS, given_up=given_up)
    headers = tuple((each["name"].lower(), each["value"]) for each in response["headers"])
    fields = dict(headers)
    if fields.get("content-type", "").startswith("text/event-stream"):
        return RecordedResponse(204, "No Content")  # a stream never ends; 204 tells pages not to retry
    if status < 200:
        return None  # a WebSocket
    # An empty body that the page does not read counts as given up in Chromium.
    bodiless = status in _BODILESS or 300 <= status < 400 or fields.get("content-length") == "0"
    given_up = "_file" not in content and not bodiless
    if given_up and "ERR_ABORTED" not in failure:
        return None
    stored = (archive, content["_file"]) if "_file" in content else None
    return RecordedResponse(status, response.get("statusText", ""), headers, stored, given_up)


class HARRecorder:
    """Records the responses of one browser context: start -> save. `clock_ms` is the time of the visit."""

    def __init__(self, context: BrowserContext, folder: Path, task: Task) -> None:
        self.clock_ms = int(time.time() * 1000)
        self.void = False  # the episode did not begin: nothing is to be kept
        self._context, self._folder, self._task = context, folder, task
        self._draft = child_process.make_scratch_folder()  # readable by its owner only

    async def start(self) -> None:
        """Start recording. Raises PlaywrightError."""
        await self._context.tracing.start_har(self._draft / HAR_MEMBER, content="attach", mode="minimal")

    async def save(self) -> Path | None:
        """Stop, and write the file unless `void`; readers never see it incomplete.

        Raises PlaywrightError, OSError, NotRecorded; the temporary files are removed in any case.
        """
        try:
            await self._context.tracing.stop_har()
            return None if self.void else await asyncio.to_thread(self._publish)
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)

    def _publish(self) -> Path:
        with tempfile.NamedTemporaryFile(prefix=".visit-", dir=self._folder) as archive:  # readable by its owner only
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
                visit = {"format": FORMAT, "task": self._task.id, "clock_ms": self.clock_ms}
                file.writestr(VISIT_MEMBER, json.dumps(visit))
                file.writestr(HAR_MEMBER, self._har())
                for member in sorted(self._draft.iterdir()):
                    if member.name != HAR_MEMBER:
                        file.write(member, member.name)
            archive.flush()
            read_visit(Path(archive.name))  # a file that cannot be replayed is not published
            number = 0
            while True:
                path = visit_path(self._folder, self._task, number)
                try:
                    os.link(archive.name, path)  # fails if another visit has this name
                    return path
                except FileExistsError:
                    number += 1

    def _har(self) -> str:
        """The HAR without request headers that replay does not read, such as Cookie and Authorization."""
        har = json.loads((self._draft / HAR_MEMBER).read_text())
        for entry in har["log"]["entries"]:
            request = entry["request"]
            request["headers"] = [each for each in request["headers"] if each["name"].lower() in READ_REQUEST_HEADERS]
        return json.dumps(har)


class HARReplayer:
    """The recorded responses of a task's visits, looked up request by request.

    A request is answered as in the first visit that made it, in the order of that visit; the last response repeats.
    """

    def __init__(self, visits: Sequence[Visit], ignored: Sequence[str] = ()) -> None:
        """`ignored`: query parameters that are left out where nothing matches with them; * stands for any text."""
        self.clock_ms = visits[0].clock_ms
        self._ignored = tuple(ignored)
        self.seconds_ago = int(time.time() - self.clock_ms / 1000)  # age of the recording: dates are moved by it
        self._exact, self._rest = _ResponseIndex(), _ResponseIndex()
        for visit in visits:
            self._exact.add((request.key, response) for request, response in visit.exchanges)
            if ignored:
                self._rest.add((self._reduced(request).key, response) for request, response in visit.exchanges)

    @classmethod
    async def open(cls, folder: Path, task: Task, ignored: Sequence[str] = ()) -> HARReplayer:
        """Read the visits of a task. Raises NotRecorded."""
        return await asyncio.to_thread(lambda: cls(read_visits(folder, task), ignored))

    async def find(self, request: ReplayRequest) -> RecordedResponse | None:
        """The next response to a request; None if it was not recorded. Raises NotRecorded for a damaged file."""
        response = self._next(request)
        if response is None and request.body:
            response = self._next(replace(request, body=None))
        if response is None:
            return None
        body = b"" if response.stored is None else await asyncio.to_thread(_read_body, *response.stored)
        return replace(response, headers=self._headers(response, request.method), body=body)

    def _next(self, request: ReplayRequest) -> RecordedResponse | None:
        response = self._exact.next(request.key)
        if response is None and self._ignored:
            response = self._rest.next(self._reduced(request).key)
        return response

    def _reduced(self, request: ReplayRequest) -> ReplayRequest:
        """The request without the ignored parameters."""
        parts, body = urlsplit(request.url), request.body
        url = urlunsplit(parts._replace(query=self._reduced_query(parts.query)))
        if body and request.content_type.split(";")[0].strip().lower() == FORM_TYPE:
            body = self._reduced_query(body.decode(errors="replace")).encode()
        return replace(request, url=url, body=body)

    def _reduced_query(self, query: str) -> str:
        pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
        kept = [pair for pair in pairs if not any(fnmatchcase(pair[0], pattern) for pattern in self._ignored)]
        return urlencode(kept, errors="surrogateescape")

    def _headers(self, response: RecordedResponse, method: str) -> tuple[tuple[str, str], ...]:
        dropped = _DROPPED_HEADERS - _HEAD_HEADERS if method == "HEAD" else _DROPPED_HEADERS
        headers = []
        for name, value in response.headers:
            if name == "set-cookie":  # several cookies of a response may be joined by line feeds
                headers += [(name, _EXPIRES.sub(self._moved_expiry, cookie)) for cookie in value.split("\n")]
            elif name in _DATES:
                headers.append((name, self._moved(value)))
            elif name not in dropped and not name.startswith(":"):
                headers.append((name, value.replace("\n", ", ")))
        return tuple(headers)

    def _moved_expiry(self, expires: re.Match[str]) -> str:
        return expires[1] + self._moved(expires[2])

    def _moved(self, date: str) -> str:
        """A date, later by the age of the recording: the browser's clock is not replayed."""
        try:
            moment = parsedate_to_datetime(date).timestamp() + self.seconds_ago
            return format_datetime(datetime.fromtimestamp(moment, UTC), usegmt=True)
        except (ValueError, TypeError, OverflowError, OSError):
            return date


def _read_body(path: Path, member: str) -> bytes:
    with _opened_visit(path) as file:
        return file.read(member)


class _ResponseIndex:
    """Responses by request: of each request those of the first visit that got an answer."""

    def __init__(self) -> None:
        self._responses: dict[RequestKey, list[RecordedResponse]] = {}
        self._asked: Counter[RequestKey] = Counter()

    def add(self, exchanges: Iterable[tuple[RequestKey, RecordedResponse]]) -> None:
        added: dict[RequestKey, list[RecordedResponse]] = {}
        for key, response in exchanges:
            added.setdefault(key, []).append(response)
        for key, responses in added.items():
            answered = any(each.complete for each in responses)
            if key not in self._responses or (answered and not any(each.complete for each in self._responses[key])):
                kept = [each for each in responses if each.status != FAILED_STATUS or each.given_up or not answered]
                self._responses[key] = kept

    def next(self, key: RequestKey) -> RecordedResponse | None:
        responses = self._responses.get(key)
        if responses is None:
            return None
        self._asked[key] += 1
        if self._asked[key] <= len(responses):
            return responses[self._asked[key] - 1]
        return next((each for each in reversed(responses) if each.complete), responses[-1])
