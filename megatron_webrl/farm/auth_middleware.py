"""ASGI middleware of browser server and router: token, loopback check, limit of the body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.farm.protocol import API_PREFIX, TOKEN_VARIABLE, ErrorResponse, dump

MAX_BODY_BYTES = 64 * 1024
MAX_DRAIN_BYTES, DRAIN_TIMEOUT_SECONDS = 2**20, 5.0
MIN_TOKEN_CHARS = 16


def read_token(host: str, file: Path | None) -> str | None:
    """Read the token from a file, else from the environment; None if `host` is loopback. Raises ConfigError."""
    if file is not None:
        try:
            token = file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"--token-file={file} cannot be read: {error.strerror}") from None
        origin = f"--token-file={file}"
    else:
        token, origin = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    if not token:
        if is_loopback(host) and file is None:
            return None
        raise ConfigError(
            f"{origin} is not set, and --host={host} is not a loopback address; set {TOKEN_VARIABLE} or --token-file "
            "to a secret"
            if file is None
            else f"{origin} is empty; write a secret into it"
        )
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"the token of {origin} is not at least {MIN_TOKEN_CHARS} letters and digits without spaces")
    return token


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback, without resolving it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class AuthMiddleware:
    """With a token, requests under API_PREFIX must carry it. Without one, a request's Host must be loopback and its
    Origin the same: this stops web pages that rebind their name to this machine or post to it.
    """

    def __init__(self, app: ASGIApp, token: str | None, body_limits: Mapping[str, int]) -> None:
        """`body_limits`: bytes by path, where they are not MAX_BODY_BYTES."""
        self._app, self._limits = app, body_limits
        self._bearer = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        limit = self._limits.get(scope["path"], MAX_BODY_BYTES)
        body = _Body(receive, limit)
        refusal = self._refusal(scope["path"], headers)
        if refusal is None and not body.is_announced_too_long(headers):

            async def answer(message: Message) -> None:
                if not body.is_too_long:  # the application reports _TooLong as an invalid request
                    await send(message)

            with suppress(_TooLong):
                await self._app(scope, body.receive, answer)
            if not body.is_too_long:
                return
        await body.drain()
        await _refuse(send, *(refusal or (413, f"the body is larger than {limit} bytes")))

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if self._bearer is not None:
            if path != API_PREFIX and not path.startswith(f"{API_PREFIX}/"):
                return None
            if hmac.compare_digest(headers.get(b"authorization", b""), self._bearer):
                return None
            return (
                401,
                f"a token is required: send Authorization: Bearer with the value of {TOKEN_VARIABLE} on the server",
            )
        host = headers.get(b"host", b"").decode("latin-1")
        if not is_loopback(_host_name(host)):
            return 403, "this server has no token and accepts loopback host names only, such as localhost"
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and urlsplit(origin).netloc != host:
            return 403, "this server has no token and does not accept requests of pages of other origins"
        return None


class _TooLong(Exception):
    pass


class _Body:
    """A request's body, up to a limit."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit = receive, limit
        self._taken = 0
        self._ended = False

    @property
    def is_too_long(self) -> bool:
        return self._taken > self._limit

    def is_announced_too_long(self, headers: Mapping[bytes, bytes]) -> bool:
        length = headers.get(b"content-length", b"0")
        return not length.isdigit() or len(length) > 18 or int(length) > self._limit

    async def receive(self) -> Message:
        message = await self._take()
        if self.is_too_long:
            raise _TooLong
        return message

    async def drain(self) -> None:
        """Read the rest of the body, within limits: closing a connection with unread data loses the response."""
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_SECONDS):
                while not self._ended and self._taken <= MAX_DRAIN_BYTES:
                    await self._take()
        except TimeoutError:
            pass

    async def _take(self) -> Message:
        message = await self._receive()
        self._taken += len(message.get("body", b""))
        self._ended = not message.get("more_body", False)
        return message


def _host_name(host: str) -> str:
    """The host of a Host header, without the port."""
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


async def _refuse(send: Send, status: int, message: str) -> None:
    body = dump(ErrorResponse(message))
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
