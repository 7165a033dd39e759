"""Who may see the pages of a run: ASGI middleware for a token that a browser keeps as a cookie, and for headers.

The address that the terminal prints holds the token once. The first request exchanges it for a cookie, so that it stays
in no history and no Referer. Pages of other sites cannot send the cookie (SameSite), read an answer, or frame a page.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(name == "token" and self._is_token(value) for name, value in query):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            response: Any = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(
                self._cookie, self._token, httponly=True, samesite="strict", secure=scope["scheme"] == "https"
            )
            await response(scope, receive, answer)
        elif self._carries_token(dict(scope["headers"])):
            await self._app(scope, receive, answer)
        else:
            text = "This page needs the token of its server: open the address that `webrl monitor` printed.\n"
            await PlainTextResponse(text, 401)(scope, receive, answer)

    def _carries_token(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, sent = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_token(sent)
        try:
            morsel = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(self._cookie)
        except CookieError:
            return False
        return morsel is not None and self._is_token(morsel.value)

    def _is_token(self, sent: str) -> bool:
        return hmac.compare_digest(sent.encode(), self._token.encode())
