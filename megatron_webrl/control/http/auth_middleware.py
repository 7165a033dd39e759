"""ASGI middleware of an HTTP service: tokens by role, loopback check, limit of the body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_webrl.control.http.json_bodies import send_json
from megatron_webrl.control.http.tokens import Token
from megatron_webrl.util.network import is_loopback

MAX_BODY_BYTES = 64 * 1024
MAX_DRAIN_BYTES, DRAIN_TIMEOUT_SECONDS = 2**20, 5.0


class AuthMiddleware:
    """A request must carry the token of the role that its path belongs to. Without tokens, its Host must be loopback
    and its Origin the same: this stops web pages that rebind their name to this machine or post to it.
    """

    def __init__(
        self, app: ASGIApp, tokens: Sequence[Token], role_of: Callable[[str], str | None],
        body_limits: Mapping[str, int], error_body: Callable[[str], bytes],
    ) -> None:  # fmt: skip
        """`role_of` a path: the role whose token it needs; None: it needs none. `body_limits`: bytes by path, where
        they are not MAX_BODY_BYTES. `error_body`: JSON of an error message.
        """
        self._app, self._tokens, self._role_of, self._limits = app, tuple(tokens), role_of, body_limits
        self._error_body = error_body

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
        status, message = refusal or (413, f"the body is larger than {limit} bytes")
        await send_json(send, status, self._error_body(message))

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        return self._token_refusal(path, headers) if self._tokens else _page_refusal(headers)

    def _token_refusal(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        role = self._role_of(path)
        if role is None:
            return None
        sent = headers.get(b"authorization", b"")
        matches = [token for token in self._tokens if hmac.compare_digest(sent, f"Bearer {token.value}".encode())]
        if any(token.role == role for token in matches):
            return None
        if matches:
            return 403, f"this is the token of a {matches[0].role}; the path needs the token of a {role}"
        names = " or ".join(token.variable for token in self._tokens if token.role == role) or f"a {role}'s token"
        return 401, f"a token is required: send Authorization: Bearer with the value of {names} on the server"


def _page_refusal(headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_loopback(_host_name(host)):
        return 403, "this server has no token and accepts loopback host names only, such as localhost"
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and _netloc(origin) != host:
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


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
