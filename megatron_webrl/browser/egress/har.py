"""Record episodes to HAR files and replay them without a network.

Each recorded visit of a task is one file, `<har_name>.<visit>.har`, of all responses, cookies and tokens included.
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
from megatron_webrl.browser.egress.http1 import FRAMING_HEADERS
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.errors import NotRecorded
from megatron_webrl.browser.page.step_messages import shorten
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.types import Task

MAX_NAME = 80  # characters of a task id in a file name
MAX_REDIRECTS = 20
MAX_URL = 120  # characters of a URL in a message
_BOUNDARY = re.compile(r'boundary="?([^";]+)')
_DROPPED_HEADERS = FRAMING_HEADERS | {"content-encoding", "connection", "keep-alive"}  # replayed decoded, unframed

RequestKey = tuple[str, str, str]  # method, URL without fragment, digest of the body


@dataclass(frozen=True)
class RecordedResponse:
    status: int
    headers: dict[str, str]  # several cookies are joined by a line feed, as Playwright expects
    body: bytes
    location: str | None  # absolute target of a redirect


def check_har_settings(settings: BrowserConfig) -> None:
    """Raises ConfigError for contradictory settings or an unusable folder."""
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
    """File name of a task: its id with unsafe characters replaced, and a digest of the id."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", task.id)[:MAX_NAME].strip("_")
    return f"{plain}-{hashlib.blake2b(task.id.encode(), digest_size=6).hexdigest()}"


class HARRecorder:
    """Records the responses of one browser context; `save` publishes them atomically as one visit."""

    def __init__(self, context: BrowserContext, folder: Path, task: Task) -> None:
        self._context, self._folder, self._name = context, folder, har_name(task)
        handle, self._draft = tempfile.mkstemp(prefix=".visit-", suffix=".har", dir=folder)
        os.close(handle)

    async def start(self) -> None:
        """Start recording. Raises PlaywrightError."""
        await self._context.tracing.start_har(self._draft, content="embed", mode="minimal")

    async def save(self) -> Path:
        """Write the file; readers never see it incomplete. Raises PlaywrightError, OSError."""
        try:
            await self._context.tracing.stop_har()
            return await asyncio.to_thread(self._publish)
        finally:
            self.discard_draft()

    def discard_draft(self) -> None:
        """Remove the temporary file. A second call does nothing."""
        Path(self._draft).unlink(missing_ok=True)

    def _publish(self) -> Path:
        os.chmod(self._draft, 0o600)
        visit = 0
        while True:
            path = self._folder / f"{self._name}.{visit}.har"
            try:
                os.link(self._draft, path)  # fails if another visit has this name
                return path
            except FileExistsError:
                visit += 1


class HARReplayer:
    """Answers the requests of one context from the recorded visits of a task; refuses all other requests."""

    def __init__(self, responses: dict[RequestKey, list[RecordedResponse]], network: NetworkAccess) -> None:
        self._responses, self._network = responses, network
        self._asked: Counter[RequestKey] = Counter()

    @classmethod
    async def start(cls, context: BrowserContext, folder: Path, task: Task, network: NetworkAccess) -> HARReplayer:
        """Intercept the context's requests. Raises NotRecorded, PlaywrightError."""
        replay = cls(await asyncio.to_thread(load_visits, folder, task), network)
        await context.route("**/*", replay._serve)
        await context.route_web_socket("**/*", replay._refuse_socket)
        return replay

    async def _serve(self, route: Route) -> None:
        with suppress(PlaywrightError):  # the requesting page has closed
            await self._respond(route)

    async def _respond(self, route: Route) -> None:
        request = route.request
        content_type = request.headers.get("content-type", "")
        response = self._next(request_key(request.method, request.url, content_type, request.post_data_buffer))
        for _ in range(MAX_REDIRECTS):
            if response is None or response.location is None or request.is_navigation_request():
                break
            response = self._next(request_key("GET", response.location, "", None))
        if response is None:
            self._refuse(request.method, request.url)
            await route.abort("blockedbyclient")
        elif response.location is not None:
            # Playwright does not route the target of a redirect here; it routes a navigation by script.
            script = f"<!DOCTYPE html><script>location.replace({_quoted(response.location)})</script>"
            cookies = {name: value for name, value in response.headers.items() if name == "set-cookie"}
            await route.fulfill(status=200, headers=cookies, content_type="text/html", body=script)
        else:
            await route.fulfill(status=response.status, headers=response.headers, body=response.body)

    def _next(self, key: RequestKey) -> RecordedResponse | None:
        """The next response to a request, in the order of the recording; the last one repeats."""
        responses = self._responses.get(key)
        if not responses:
            return None
        self._asked[key] += 1
        return responses[min(self._asked[key], len(responses)) - 1]

    async def _refuse_socket(self, socket: WebSocketRoute) -> None:
        self._refuse("WebSocket", socket.url)
        await socket.close()

    def _refuse(self, method: str, url: str) -> None:
        try:
            host = split_url(url)[1].host
        except EgressDenied:
            host = ""
        sentence = f"{method} {shorten(url, MAX_URL)} was not recorded (browser.replay)"
        self._network.record_refusal(host, EgressDenied("not_recorded", sentence))


def load_visits(folder: Path, task: Task) -> dict[RequestKey, list[RecordedResponse]]:
    """The responses of all visits of a task, for each request those of the first visit with it. Raises NotRecorded."""
    joined: dict[RequestKey, list[RecordedResponse]] = {}
    name, visit = har_name(task), 0
    while (path := folder / f"{name}.{visit}.har").is_file():
        for key, responses in _read(path).items():
            joined.setdefault(key, responses)
        visit += 1
    if not visit:
        raise NotRecorded(f"{task.id} has no archive {name}.0.har in {folder} (browser.replay); record it first")
    return joined


def request_key(method: str, url: str, content_type: str, body: bytes | None) -> RequestKey:
    """Key under which requests count as equal; the random boundary of multipart forms is ignored."""
    content = body or b""
    if match := _BOUNDARY.search(content_type):
        content = content.replace(match[1].encode(), b"boundary")
    return method, urldefrag(url).url, hashlib.blake2b(content, digest_size=16).hexdigest()


def _read(path: Path) -> dict[RequestKey, list[RecordedResponse]]:
    try:
        entries = json.loads(path.read_text())["log"]["entries"]
        responses: dict[RequestKey, list[RecordedResponse]] = {}
        for entry in entries:
            request, response = entry["request"], entry["response"]
            # An aborted response has no status; 304 refers to a cached response that is not recorded.
            if response["status"] > 0 and response["status"] != 304:
                posted = request.get("postData", {})
                body = posted.get("text", "").encode()
                key = request_key(request["method"], request["url"], posted.get("mimeType", ""), body)
                responses.setdefault(key, []).append(_recorded_response(request["url"], response))
        return responses
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRecorded(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _recorded_response(url: str, response: dict[str, Any]) -> RecordedResponse:
    headers: dict[str, str] = {}
    for header in response["headers"]:
        name, value = header["name"].lower(), header["value"]
        if name == "set-cookie" and name in headers:
            headers[name] += "\n" + value
        elif name not in _DROPPED_HEADERS and not name.startswith(":"):
            headers[name] = value
    content = response.get("content", {})
    text, encoded = content.get("text", ""), content.get("encoding") == "base64"
    if text and not encoded and "content-type" in headers:  # replayed as UTF-8
        headers["content-type"] = headers["content-type"].split(";")[0] + "; charset=utf-8"
    redirected = 300 <= response["status"] < 400 and "location" in headers
    return RecordedResponse(
        response["status"], headers, base64.b64decode(text) if encoded else text.encode(),
        urljoin(url, headers["location"]) if redirected else None,
    )  # fmt: skip


def _quoted(text: str) -> str:
    return json.dumps(text).replace("<", "\\u003c")
