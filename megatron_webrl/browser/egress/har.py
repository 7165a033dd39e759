"""Episodes recorded to HAR archives, and replayed from them without a network.

A task has one archive for each visit: `NAME.0.har`, `NAME.1.har`, ... NAME is made of the task's id. They hold
everything that servers said, cookies and tokens included.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

from playwright.async_api import BrowserContext, Route, WebSocketRoute
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.egress.egress_policy import EgressDenied, split_url
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.errors import NotRecorded
from megatron_webrl.browser.page.step_messages import shorten
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.types import Task

MAX_NAME = 80  # characters of a task's id in a file name
MAX_REDIRECTS = 20
MAX_URL = 120  # characters of an address in a note
_BOUNDARY = re.compile(r'boundary="?([^";]+)')
# Answers are fulfilled as they were read: decoded, and whole.
_FRAMING = frozenset({"content-encoding", "content-length", "transfer-encoding", "connection", "keep-alive"})

RequestKey = tuple[str, str, str]
"""Method, address without fragment, digest of the body."""


@dataclass(frozen=True)
class RecordedResponse:
    """What a server said once."""

    status: int
    headers: dict[str, str]  # several cookies are joined by a line feed, as Playwright takes them
    body: bytes
    location: str | None  # where a redirect leads to, absolute


def check_har_settings(settings: BrowserConfig) -> None:
    """Raises ConfigError for settings that contradict each other, or a folder that cannot be used."""
    if settings.record and settings.replay:
        raise ConfigError("browser.record and browser.replay are both set; leave one of them empty")
    if settings.replay and not Path(settings.replay).is_dir():
        raise ConfigError(f"browser.replay={settings.replay} is not a folder; record one with browser.record")
    if settings.record:
        try:
            Path(settings.record).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"browser.record={settings.record} cannot be written: {error.strerror}") from error


def har_name(task: Task) -> str:
    """A file name for a task: its id as far as that is safe, and a digest that tells ids apart."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", task.id)[:MAX_NAME].strip("_")
    return f"{plain}-{hashlib.blake2b(task.id.encode(), digest_size=6).hexdigest()}"


class HARRecorder:
    """What one context is answered, from `start` on; `save` makes a visit of it, in one stroke."""

    def __init__(self, context: BrowserContext, folder: Path, task: Task) -> None:
        self._context, self._folder, self._name = context, folder, har_name(task)
        handle, self._draft = tempfile.mkstemp(prefix=".visit-", suffix=".har", dir=folder)
        os.close(handle)

    async def start(self) -> None:
        """Begin to record. Raises PlaywrightError."""
        await self._context.tracing.start_har(self._draft, content="embed", mode="minimal")

    async def save(self) -> Path:
        """Write the archive; no reader sees half of it. Raises PlaywrightError, OSError."""
        try:
            await self._context.tracing.stop_har()
            return await asyncio.to_thread(self._publish)
        finally:
            self.discard_draft()

    def discard_draft(self) -> None:
        """Leave nothing behind. A second call does nothing."""
        Path(self._draft).unlink(missing_ok=True)

    def _publish(self) -> Path:
        os.chmod(self._draft, 0o600)
        visit = 0
        while True:
            place = self._folder / f"{self._name}.{visit}.har"
            try:
                os.link(self._draft, place)  # which fails where another visit has the name already
                return place
            except FileExistsError:
                visit += 1


class HARReplayer:
    """Answers the requests of one context from the archives of a task, and refuses all others."""

    def __init__(self, answers: dict[RequestKey, list[RecordedResponse]], access: NetworkAccess) -> None:
        self._answers, self._access = answers, access
        self._asked: Counter[RequestKey] = Counter()

    @classmethod
    async def start(cls, context: BrowserContext, folder: Path, task: Task, access: NetworkAccess) -> HARReplayer:
        """Take over the context's requests. Raises NotRecorded, PlaywrightError."""
        replay = cls(await asyncio.to_thread(load_visits, folder, task), access)
        await context.route("**/*", replay._serve)
        await context.route_web_socket("**/*", replay._refuse_socket)
        return replay

    async def _serve(self, route: Route) -> None:
        with suppress(PlaywrightError):  # the page that asked has gone
            await self._answer(route)

    async def _answer(self, route: Route) -> None:
        request = route.request
        content_type = request.headers.get("content-type", "")
        answer = self._next(request_key(request.method, request.url, content_type, request.post_data_buffer))
        for _ in range(MAX_REDIRECTS):
            if answer is None or answer.location is None or request.is_navigation_request():
                break
            answer = self._next(request_key("GET", answer.location, "", None))
        if answer is None:
            self._refuse(request.method, request.url)
            await route.abort("blockedbyclient")
        elif answer.location is not None:
            # What a redirect leads to would not be asked of this class; a page that goes there is.
            script = f"<!DOCTYPE html><script>location.replace({_quoted(answer.location)})</script>"
            cookies = {name: value for name, value in answer.headers.items() if name == "set-cookie"}
            await route.fulfill(status=200, headers=cookies, content_type="text/html", body=script)
        else:
            await route.fulfill(status=answer.status, headers=answer.headers, body=answer.body)

    def _next(self, key: RequestKey) -> RecordedResponse | None:
        """The answers to the same request come in the order in which they were recorded; the last one stays."""
        found = self._answers.get(key)
        if not found:
            return None
        self._asked[key] += 1
        return found[min(self._asked[key], len(found)) - 1]

    async def _refuse_socket(self, socket: WebSocketRoute) -> None:
        self._refuse("WebSocket", socket.url)
        await socket.close()

    def _refuse(self, method: str, url: str) -> None:
        try:
            host = split_url(url)[1].host
        except EgressDenied:
            host = ""
        sentence = f"{method} {shorten(url, MAX_URL)} was not recorded (browser.replay)"
        self._access.record_refusal(host, EgressDenied("not_recorded", sentence))


def load_visits(folder: Path, task: Task) -> dict[RequestKey, list[RecordedResponse]]:
    """The answers of all visits of a task; a request is answered as in the first visit that made it.

    Raises NotRecorded.
    """
    joined: dict[RequestKey, list[RecordedResponse]] = {}
    name, visit = har_name(task), 0
    while (place := folder / f"{name}.{visit}.har").is_file():
        for key, answers in _read(place).items():
            joined.setdefault(key, answers)
        visit += 1
    if not visit:
        raise NotRecorded(f"{task.id} has no archive {name}.0.har in {folder} (browser.replay); record it first")
    return joined


def request_key(method: str, url: str, content_type: str, body: bytes | None) -> RequestKey:
    """What makes two requests the same one. The random boundary between the parts of a form makes no difference."""
    content = body or b""
    if found := _BOUNDARY.search(content_type):
        content = content.replace(found[1].encode(), b"boundary")
    return method, urldefrag(url).url, hashlib.blake2b(content, digest_size=16).hexdigest()


def _read(place: Path) -> dict[RequestKey, list[RecordedResponse]]:
    try:
        entries = json.loads(place.read_text())["log"]["entries"]
        found: dict[RequestKey, list[RecordedResponse]] = {}
        for entry in entries:
            request, response = entry["request"], entry["response"]
            # One that was broken off has no status; that nothing has changed is of no use without what was there.
            if response["status"] > 0 and response["status"] != 304:
                posted = request.get("postData", {})
                body = posted.get("text", "").encode()
                key = request_key(request["method"], request["url"], posted.get("mimeType", ""), body)
                found.setdefault(key, []).append(_answer_of(request["url"], response))
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRecorded(f"{place} cannot be read: {type(error).__name__}: {error}") from error


def _answer_of(url: str, response: dict[str, Any]) -> RecordedResponse:
    headers: dict[str, str] = {}
    for header in response["headers"]:
        name, value = header["name"].lower(), header["value"]
        if name == "set-cookie" and name in headers:
            headers[name] += "\n" + value
        elif name not in _FRAMING and not name.startswith(":"):
            headers[name] = value
    content = response.get("content", {})
    text, encoded = content.get("text", ""), content.get("encoding") == "base64"
    if text and not encoded and "content-type" in headers:  # it was decoded, and is written anew
        headers["content-type"] = headers["content-type"].split(";")[0] + "; charset=utf-8"
    redirected = 300 <= response["status"] < 400 and "location" in headers
    return RecordedResponse(
        response["status"], headers, base64.b64decode(text) if encoded else text.encode(),
        urljoin(url, headers["location"]) if redirected else None,
    )  # fmt: skip


def _quoted(text: str) -> str:
    return json.dumps(text).replace("<", "\\u003c")
