"""The control service of a job: the facts, tickets and heartbeats of its roles, over HTTP. No data passes through it.

    POST /commands   run commands of the state machine (state.py); each request once, however often it is sent
    POST /claim      the same for one `claim`, which waits until there is a slot to claim
    POST /exchange   a role's heartbeat and report; waits until one of the facts it subscribes to changes
    GET  /status     the whole job at a glance

Every reply but that of /status carries what has changed of the facts that the sender's session subscribes to, so that a
role which has claimed a ticket knows all facts from before the claim. docs/architecture.md describes the use,
docs/security.md the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megatron_webrl.control.address import ControlAddress
from megatron_webrl.control.journal import Journal, restore
from megatron_webrl.control.liveness import Liveness
from megatron_webrl.control.state import QUERIES, TICKETS, JobState
from megatron_webrl.service.auth_middleware import AuthMiddleware
from megatron_webrl.service.connections import ConnectionLimits
from megatron_webrl.service.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.service.tokens import Token

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 90.0  # longest time that ControlClient.keep_alive delays the exit after the end of the job
LINGER_SECONDS = 10.0  # after that, so that every role reads the outcome
MAX_WAIT_SECONDS = 5.0  # of a request that waits
SESSION_SECONDS = 60.0  # a session without requests is forgotten after this time
EXCHANGES_PER_SECOND = 1000  # of all sessions: with more of them, heartbeats are less frequent
TICK_SECONDS = 0.1
MAX_BODY_BYTES = 64 * 2**20
LIMITS = ConnectionLimits(max_connections=16_384, max_per_address=8192)  # a role has up to three connections


@dataclass
class Session:
    """What a client has subscribed to, and the revisions of changed facts that it may not have."""

    keys: set[str] = field(default_factory=set)
    pending: dict[str, int] = field(default_factory=dict)  # revision by changed key
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    heard_at: float = 0.0


class ControlService:
    """Serves one job. Belongs to one event loop."""

    def __init__(self, state: JobState, journal: Journal, job_id: str, heartbeat_timeout_seconds: float) -> None:
        self.state, self.journal, self.job_id = state, journal, job_id
        self.id = secrets.token_hex(8)  # clients see that a service was started again
        self.liveness = Liveness(heartbeat_timeout_seconds)
        self._revision = 1
        self._silent: dict[str, bool] = {}  # whether it was cleared, by silent role
        self._sessions: dict[str, Session] = {}
        self._subscribers: defaultdict[str, set[str]] = defaultdict(set)  # sessions by key
        self._free_slots: defaultdict[str, asyncio.Condition] = defaultdict(asyncio.Condition)  # by counter

    def app(self) -> Starlette:
        """The service as an application, without its token."""
        routes = [
            Route("/commands", self._commands, methods=["POST"]),
            Route("/claim", self._claim, methods=["POST"]),
            Route("/exchange", self._exchange, methods=["POST"]),
            Route("/status", self._status, methods=["GET"]),
        ]
        handlers = dict.fromkeys((ValueError, KeyError, TypeError, IndexError, AttributeError), _bad_request)
        return Starlette(routes=routes, exception_handlers=handlers)

    async def run(self, seconds: float | None) -> None:
        """Watch the heartbeats until the job has ended and its roles could read that, or `seconds` have passed."""
        started = time.monotonic()
        while "end" not in self.state.facts:
            if seconds is not None and time.monotonic() - started > seconds:
                log.warning("the control service exits after %.0f s although the job has not ended", seconds)
                return
            self._watch(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)
        for key, limit in (("keep_alive", KEEP_ALIVE_SECONDS), ("end", LINGER_SECONDS)):
            since = time.monotonic()
            while key in self.state.facts and time.monotonic() - since < limit and "shutdown" not in self.state.facts:
                self._watch(time.monotonic())
                await asyncio.sleep(TICK_SECONDS / 2)

    # -- requests ---------------------------------------------------------------------------------

    async def _commands(self, request: Request) -> Response:
        body = await request.json()
        stream, number, commands = str(body["stream"]), int(body["number"]), body["commands"]
        replies = await self._apply(stream, number, commands)
        return self._reply(body, replies)

    async def _claim(self, request: Request) -> Response:
        """A claim that finds no slot waits without a place in the journal."""
        body = await request.json()
        stream, number, arguments = str(body["stream"]), int(body["number"]), body["arguments"]
        name, deadline = str(arguments[0]), time.monotonic() + _wait_seconds(body)
        available = self._free_slots[name]
        async with available:
            while not self.state.free_slots(name) and not self.state.is_applied(stream, number):
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await available.wait()
                except TimeoutError:
                    return self._reply(body, [[]])
                if await request.is_disconnected():
                    available.notify()  # another one takes its turn
                    return self._reply(body, [[]])
        return self._reply(body, await self._apply(stream, number, [["claim", *arguments]]))

    async def _exchange(self, request: Request) -> Response:
        body = await request.json()
        if "clear" in body:
            self.liveness.clear(str(body["clear"]))
        if "role" in body:
            self.liveness.report(str(body["role"]), time.monotonic(), body.get("report") or {})
            self._watch(time.monotonic())
        session = self._session(body)
        if session is not None and not self._news(session, body):
            session.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_wait_seconds(body)):
                    await session.changed.wait()
        return self._reply(body, [], session)

    async def _status(self, request: Request) -> Response:
        state, now = self.state, time.monotonic()
        self._watch(now)  # the service may have been suspended until now
        counter = state.counters.get(TICKETS)
        tickets = None
        if counter is not None and state.epochs:
            tickets = {"claimed": counter.claimed, "limit": counter.limit, "in_progress": len(counter.open)}
        instances = {
            key.removeprefix("instances/"): n for key, n in state.facts.items() if key.startswith("instances/")
        }
        return _json(
            {
                "job_id": self.job_id,
                "end": state.facts.get("end"),
                "stop": state.facts.get("stop"),
                "tickets": tickets,
                "roles": self.liveness.to_json(now),
                "instances": instances,
                "heartbeat_timeout_seconds": self.liveness.timeout_seconds,
                "journal_error": self.journal.error,
            }
        )

    # -- state ------------------------------------------------------------------------------------

    async def _apply(self, stream: str, number: int, commands: Any) -> list[Any]:
        if all(command[0] in QUERIES for command in commands):
            return self.state.query(commands)
        known = self.state.is_applied(stream, number)
        replies = self.state.apply(stream, number, commands)
        if not known:
            self.journal.append(stream, number, commands, self.state)
        changed, self.state.changed = self.state.changed, set()
        for key in changed:
            self._publish(key)
        for counter in (key for key in changed if self.state.free_slots(key)):
            async with self._free_slots[counter]:
                self._free_slots[counter].notify_all()
        await self.journal.sync()
        return replies

    def _watch(self, now: float) -> None:
        """Publish which roles are silent, and forget sessions that have ended."""
        before, self._silent = self._silent, self.liveness.silent_roles(now)
        for role in before.keys() | self._silent.keys():
            if before.get(role) != self._silent.get(role):
                self._publish(f"silent/{role}")
        for name in [name for name, each in self._sessions.items() if now - each.heard_at > SESSION_SECONDS]:
            for key in self._sessions.pop(name).keys:
                self._subscribers[key].discard(name)

    # -- subscriptions ----------------------------------------------------------------------------

    def _session(self, body: Mapping[str, Any]) -> Session | None:
        """The sender's session with its new subscriptions; None without one."""
        if not (name := body.get("session")):
            return None
        session = self._sessions.setdefault(str(name), Session())
        session.heard_at = time.monotonic()
        self._revision += bool(body.get("subscribe"))  # a client at the current revision lacks what it subscribes to
        for key in body.get("subscribe", ()):
            if key not in session.keys:
                session.keys.add(key)
                session.pending[key] = self._revision
                self._subscribers[key].add(str(name))
        return session

    def _news(self, session: Session, body: Mapping[str, Any]) -> dict[str, int]:
        """Revisions of the subscribed facts that the sender lacks, which knows those up to `known` of a service."""
        known = int(body.get("known", 0)) if body.get("service") == self.id else 0
        session.pending = {key: revision for key, revision in session.pending.items() if revision > known}
        return session.pending

    def _publish(self, key: str) -> None:
        self._revision += 1
        for name in self._subscribers.get(key, ()):
            session = self._sessions[name]
            session.pending[key] = self._revision
            session.changed.set()

    def _value(self, key: str) -> Any:
        if key.startswith("silent/"):
            return self._silent.get(key.removeprefix("silent/"))
        return self.state.facts.get(key)

    def _reply(self, body: Mapping[str, Any], replies: list[Any], session: Session | None = None) -> Response:
        """An answer with what the sender's session lacks; `session`: if the caller has looked it up."""
        content: dict[str, Any] = {"service": self.id, "replies": replies}
        if (session := session or self._session(body)) is not None:
            content["interval"] = max(1.0, len(self._sessions) / EXCHANGES_PER_SECOND)
            content["revision"] = self._revision
            content["subscriptions"] = len(session.keys)
            news = self._news(session, body)
            content["facts"] = {key: [revision, self._value(key)] for key, revision in news.items()}
        return _json(content)


def serve(
    host: str,
    port: int,
    job_id: str,
    address_file: Path,
    journal: Path,
    heartbeat_timeout_seconds: float = 60.0,
    seconds: float | None = None,
) -> None:
    """Run the service until the job has ended and its roles could read the outcome, or `seconds` have passed.

    Listens on `host` only. `address_file` receives address, job id and token once connections are accepted. If the
    journal exists, the service continues the job of both files, at the same address. Raises ConfigError, JournalError,
    OSError.
    """
    known = ControlAddress.read(address_file) if journal.exists() else None
    state = restore(journal) if known is not None else JobState()
    token = secrets.token_urlsafe(32) if known is None else known.token
    job_id, port = (job_id, port) if known is None else (known.job_id, known.port)
    listener = Listener(ListenAddress(host, port, limits=LIMITS))
    address = ControlAddress(host, listener.socket.getsockname()[1], os.getpid(), job_id, token)
    if known is None:
        journal.unlink(missing_ok=True)
    asyncio.run(_serve(state, journal, address, address_file, listener, heartbeat_timeout_seconds, seconds))


async def _serve(
    state: JobState,
    journal: Path,
    address: ControlAddress,
    address_file: Path,
    listener: Listener,
    heartbeat_timeout_seconds: float,
    seconds: float | None,
) -> None:
    opened = Journal(journal)
    service = ControlService(state, opened, address.job_id, heartbeat_timeout_seconds)
    token = Token("job", address_file.name, address.token)
    limits = dict.fromkeys(("/commands", "/claim", "/exchange"), MAX_BODY_BYTES)
    app = AuthMiddleware(service.app(), [token], lambda _: "job", limits, lambda message: _encoded({"error": message}))
    async with run_http_server(app, listener):
        address.write(address_file)
        await service.run(seconds)
    opened.close()


def _wait_seconds(body: Mapping[str, Any]) -> float:
    return min(max(float(body.get("wait", 0.0)), 0.0), MAX_WAIT_SECONDS)


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encoded(content), status, media_type="application/json")


def _encoded(content: Any) -> bytes:
    return json.dumps(content).encode()  # ASCII: lone surrogates survive


async def _bad_request(request: Request, error: Exception) -> Response:
    return _json({"error": f"{type(error).__name__}: {error}"}, 400)
