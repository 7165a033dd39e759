"""What the clients of a server have subscribed to, and which changes each may lack. The control service and its relays
serve subscriptions. Belongs to one event loop.

A session has the keys that its client has subscribed to. Each change of a subscribed fact has a number, and every
answer names the last one: a client that sends this number with its next request has all changes up to it. An answer
that is lost loses nothing. Sessions are not durable: a client sees from the number of subscriptions that its session is
another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_webrl.control.http.auth_middleware import AuthMiddleware
from megatron_webrl.control.http.json_bodies import encoded, send_json
from megatron_webrl.control.http.tokens import Token

MAX_WAIT_SECONDS = 5.0  # of a request that waits
SESSION_SECONDS = 60.0  # a session without requests is forgotten after this time
EXCHANGES_PER_SECOND = 1000  # of all sessions: with more of them, heartbeats are less frequent
WOKEN_AT_ONCE = 8  # waiting exchanges answered before the event loop looks for other requests
MAX_BODY_BYTES = 64 * 2**20
_INVALID = (ValueError, KeyError, TypeError, IndexError, AttributeError)  # raised for a body of another form

Body = Mapping[str, Any]
Handler = Callable[[Any, Request], Awaitable[bytes]]  # gets the body, returns the answer


class Unavailable(Exception):
    """The request cannot be answered now: status 503. The message says why."""


@dataclass
class Session:
    """What a client has subscribed to, and the numbers of changes that it may not have."""

    keys: set[str] = field(default_factory=set)
    pending: dict[str, int] = field(default_factory=dict)  # number of the change, by key
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    heard_at: float = 0.0


class Subscriptions:
    """All sessions of a server."""

    def __init__(self, read: Callable[[str], tuple[int, Any]]) -> None:
        """`read` returns the revision and the value of a fact."""
        self.id = secrets.token_hex(8)  # of this process: numbers of another one mean nothing
        self.number = 1  # of the last change
        self._read = read
        self._sessions: dict[str, Session] = {}
        self._subscribers: defaultdict[str, set[str]] = defaultdict(set)  # sessions by key
        self._exchanges = 0  # that wait
        self._changed: deque[Session] = deque()  # to wake
        self._encoded: tuple[object, bytes] = (None, b"")  # facts of the last answer: most others have the same

    def publish(self, key: str) -> None:
        """A fact has changed."""
        if not (names := self._subscribers.get(key)):
            return
        self.number += 1
        idle = not self._changed
        for name in names:
            session = self._sessions[name]
            session.pending[key] = self.number
            if not session.changed.is_set():
                self._changed.append(session)
        if idle and self._changed:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        """Wake a few sessions, and others after the requests that have arrived meanwhile."""
        for _ in range(min(WOKEN_AT_ONCE, len(self._changed))):
            self._changed.popleft().changed.set()
        if self._changed:
            asyncio.get_running_loop().call_soon(self._wake)

    async def wait(self, body: Body) -> None:
        """Wait for news of the sender's session, as long as the request allows."""
        session = self._session(body)
        if session is None or self._news(session, body):
            return
        session.changed.clear()
        self._exchanges += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds(body)):
                    await session.changed.wait()
        finally:
            self._exchanges -= 1

    def answer(self, body: Body, replies: Sequence[Any] = (), times: Mapping[str, Any] | None = None) -> bytes:
        """An answer with the news of the sender's session. `times`: those of clock.py."""
        content: dict[str, Any] = {"server": self.id, "replies": replies}
        if times is not None:
            content["times"] = times
        if (session := self._session(body)) is None:
            return encoded(content)
        content["interval"] = max(1.0, self._exchanges / EXCHANGES_PER_SECOND)
        content["number"] = self.number
        content["subscriptions"] = len(session.keys)
        facts = self._encode(tuple(self._news(session, body)))
        return b'%s, "facts": %s}' % (encoded(content)[:-1], facts)

    def forget_old(self, now: float) -> None:
        """Forget the sessions that have ended."""
        for name in [name for name, each in self._sessions.items() if now - each.heard_at > SESSION_SECONDS]:
            for key in self._sessions.pop(name).keys:
                self._subscribers[key].discard(name)

    def _session(self, body: Body) -> Session | None:
        """The sender's session with its new subscriptions; None without one."""
        if not (name := body.get("session")):
            return None
        session = self._sessions.setdefault(str(name), Session())
        session.heard_at = time.monotonic()
        if new := [key for key in body.get("subscribe", ()) if key not in session.keys]:
            self.number += 1  # a client that has all changes lacks what it subscribes to
            for key in new:
                session.keys.add(key)
                session.pending[key] = self.number
                self._subscribers[key].add(str(name))
        return session

    def _news(self, session: Session, body: Body) -> dict[str, int]:
        """The changes that the sender lacks."""
        known = int(body.get("known", 0)) if body.get("server") == self.id else 0
        if session.pending:
            session.pending = {key: number for key, number in session.pending.items() if number > known}
        return session.pending

    def _encode(self, keys: tuple[str, ...]) -> bytes:
        if self._encoded[0] != (keys, self.number):
            self._encoded = (keys, self.number), encoded({key: self._read(key) for key in keys})
        return self._encoded[1]


def json_app(handlers: Mapping[str, Handler], token: Token) -> ASGIApp:
    """An application that serves JSON: a handler by method and path, such as "POST /exchange". Needs the token."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if (handler := handlers.get(f"{scope['method']} {scope['path']}")) is None:
            await send_json(send, 404, encoded({"error": "unknown request"}))
            return
        try:
            body = json.loads(await request.body()) if scope["method"] == "POST" else None
            status, content = 200, await handler(body, request)
        except ClientDisconnect:  # its process has ended before the body was complete
            return
        except Unavailable as error:
            status, content = 503, encoded({"error": str(error)})
        except _INVALID as error:
            status, content = 400, encoded({"error": f"{type(error).__name__}: {error}"})
        await send_json(send, status, content)

    limits = {each.partition(" ")[2]: MAX_BODY_BYTES for each in handlers if each.startswith("POST")}
    return AuthMiddleware(app, [token], lambda _: token.role, limits, lambda message: encoded({"error": message}))


def wait_seconds(body: Body) -> float:
    """For how long a request may wait."""
    return min(max(float(body.get("wait", 0.0)), 0.0), MAX_WAIT_SECONDS)
