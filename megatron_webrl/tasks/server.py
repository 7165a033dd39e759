"""A folder served over HTTP on this machine.

A server, not interception of the requests by the automation driver: both take the same time for a page, but
the server works in any Chromium, keeps working when the driver is busy, and gives pages a real origin.
"""

from __future__ import annotations

import mimetypes
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

IDLE_SECONDS = 60.0


class FolderServer:
    """Serves the files of `folder` at `address` (host:port) until closed. The set of files is fixed at the start."""

    def __init__(self, folder: Path) -> None:
        # Only files known from the start can be asked for, so no path leads out of the folder.
        files = {"/" + file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        self._server = _Server(("127.0.0.1", 0), files)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="folder-server", daemon=True
        )
        self._thread.start()

    @property
    def connections(self) -> int:
        """Connections accepted so far."""
        return self._server.connections

    def close(self) -> None:
        """Stop answering. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], files: dict[str, Path]) -> None:
        super().__init__(address, _Handler)
        self.files = files
        self.contents: dict[str, bytes] = {}
        self.connections = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def content(self, path: str) -> bytes | None:
        if path not in self.contents and path in self.files:
            self.contents[path] = self.files[path].read_bytes()
        return self.contents.get(path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.server.content(path)
        try:
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", mimetypes.guess_type(path)[0] or "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "max-age=3600")
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the page was closed while it loaded

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""
