"""Answers of the pages, and who may see them: ASGI middleware for a token that a browser keeps as a cookie.

The address that the terminal prints holds the token once. The first request exchanges it for a cookie, so that it stays
in no history and no Referer. Pages of other sites cannot send the cookie (SameSite), read an answer, or frame a page.
No browser keeps an answer: runs have the same addresses.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_webrl.control.http.access import encoded
from megatron_webrl.util.image_type import image_type

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
NO_STORE = {"cache-control": "no-store"}


def number_of(request: Request, name: str, default: float, low: float = -math.inf) -> float:
    """A number of the query. Raises HTTPException."""
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not (low <= value and abs(value) < 2**53):
        raise HTTPException(400, f"{name}={text} is not a number{'' if low < 0 else ' from 0 on'}")
    return value


def answers(function: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint, run in a thread, that answers with JSON."""

    def answer(request: Request) -> Response:
        return json_response(function(request))

    return answer


def json_response(content: Any, status: int = 200) -> Response:
    return Response(encoded(content), status, NO_STORE, "application/json")


def image_response(image: bytes | memoryview) -> Response:
    data = bytes(image)
    return Response(data, media_type=image_type(data) or "application/octet-stream", headers=NO_STORE)


class MonitorAccess:
    """Requests need the token, in the cookie, in the query, or as `Authorization: Bearer`. Every answer has HEADERS."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        """`cookie`: its name, different for each port, because a browser sends cookies to all ports of a host."""
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request with the token, or answer it."""
        if scope["type"] != "http":
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        query = request.query_params.multi_items()
        app: ASGIApp
        if any(name == "token" and self._is_token(value) for name, value in query):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            app = response = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(
                self._cookie, self._token, httponly=True, samesite="strict", secure=scope["scheme"] == "https"
            )
        elif self._carries_token(request):
            app = self._app
        else:
            text = "This page needs the token of its server: open the address that `webrl monitor` printed.\n"
            app = PlainTextResponse(text, 401)
        await app(scope, receive, answer)

    def _carries_token(self, request: Request) -> bool:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        return self._is_token(sent if scheme.lower() == "bearer" else request.cookies.get(self._cookie, ""))

    def _is_token(self, sent: str) -> bool:
        return hmac.compare_digest(sent.encode(errors="replace"), self._token.encode())
