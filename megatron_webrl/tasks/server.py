"""Local HTTP server of task pages.

Interception of requests by the automation driver would take the same time per page; a server works in any Chromium,
keeps working when the driver is busy, and gives pages a real origin.
"""

from __future__ import annotations

import contextlib
import logging
import mimetypes
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 60.0
MAX_FORM_BYTES = 64 * 1024
MAX_FORM_FIELDS = 100


@dataclass(frozen=True)
class PageRequest:
    """An HTTP request of a page. Of repeated fields the last one counts."""

    method: str  # "GET" or "POST"
    host: str  # without the port, lower case
    path: str  # decoded
    query: Mapping[str, str]
    form: Mapping[str, str]
    cookies: Mapping[str, str]


@dataclass(frozen=True)
class PageResponse:
    """An HTTP response, sent after `delay` seconds."""

    status: int
    body: bytes = b""
    content_type: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0


class LocalServer:
    """Answers requests with `respond`, called from many threads. Starts when `address` is first read.

    So a source that only makes tasks, while other processes serve its pages, starts no server.
    """

    def __init__(self, respond: Callable[[PageRequest], PageResponse], name: str) -> None:
        self._name, self._closing, self._starting = name, threading.Event(), threading.Lock()
        self._handler = partial(_Handler, respond, self._closing)
        self._server: _HttpServer | None = None

    @property
    def address(self) -> str:
        """host:port of the server; starts it if necessary. Raises RuntimeError if it was closed before it started."""
        with self._starting:
            if self._server is None and self._closing.is_set():
                raise RuntimeError(f"{self._name} was closed before it was started; make another one")
            if self._server is None:
                self._server = _HttpServer(("127.0.0.1", 0), self._handler)
                threading.Thread(target=self._server.serve_forever, args=(0.1,), name=self._name, daemon=True).start()
            return f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop answering. A second call does nothing."""
        with self._starting:
            if self._server is not None and not self._closing.is_set():
                self._closing.set()
                self._server.shutdown()
                self._server.server_close()
            self._closing.set()


class FolderServer(LocalServer):
    """Serves the files of `folder` and `others` by path, text as UTF-8. The set of files is fixed at the start."""

    def __init__(self, folder: Path, others: Mapping[str, Path] = MappingProxyType({})) -> None:
        # Only files listed here are served, so no path leads out of the folder.
        self._files = {"/" + file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        self._files.update(others)
        super().__init__(self._respond, "folder-server")

    def _respond(self, request: PageRequest) -> PageResponse:
        file = self._files.get(request.path)
        if request.method != "GET" or file is None:
            return PageResponse(404)
        kind = mimetypes.guess_type(request.path)[0] or "application/octet-stream"
        if kind.startswith("text/"):
            kind += "; charset=utf-8"
        return PageResponse(200, file.read_bytes(), kind, {"Cache-Control": "max-age=3600"})


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = KEEP_ALIVE_SECONDS
    disable_nagle_algorithm = True  # headers and body are two writes; the second must not wait for an acknowledgement

    def __init__(
        self, respond: Callable[[PageRequest], PageResponse], closing: threading.Event, *connection: Any
    ) -> None:
        self._respond_to, self._closing = respond, closing
        super().__init__(*connection)

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_FORM_BYTES:
            self.close_connection = True  # the body stays unread
            self._send(PageResponse(413 if length.isdecimal() else 411))
        else:
            self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        try:
            parts = urlsplit(self.path)
            request = PageRequest(
                method=self.command,
                host=self.headers.get("Host", "").split(":")[0].lower(),
                path=unquote(parts.path),
                query=_pairs(parts.query),
                form=_pairs(body.decode()),
                cookies=_cookies(self.headers.get("Cookie", "")),
            )
        except ValueError:  # such as too many fields, or not UTF-8
            self._send(PageResponse(400))
            return
        try:
            response = self._respond_to(request)
        except Exception:  # from the code of a page; nothing above this thread would report it
            log.exception("%s %s%s failed", request.method, request.host, request.path)
            response = PageResponse(500)
        if response.delay > 0:
            self._closing.wait(response.delay)
        self._send(response)

    def _send(self, response: PageResponse) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(response.body)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the page was closed while it loaded
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _pairs(text: str) -> dict[str, str]:
    return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS))


def _cookies(header: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}
