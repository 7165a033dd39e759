"""The control service of a job: the facts, tickets and heartbeats of its roles, over HTTP. No data passes through it.

    POST /sync       heartbeats and commands; answers with replies, and with the facts that have changed
    GET  /status     the whole job at a glance
    GET  /rollouts   what each rollout does; for this, workers report them while someone asks (liveness.py)

Commands are those of the state machine (state.py); they run once, however often a request is sent. A request without
commands waits until a fact changes that its sender follows (facts.py), a single `claim` until there is an item. On a
cluster the supervisor of a node sends the heartbeats of all its roles (relay.py). docs/architecture.md describes the
use, docs/operations.md the token.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_webrl.control.connection import ControlAddress
from megatron_webrl.control.facts import Body, FactFeed, wait_seconds
from megatron_webrl.control.http.access import AuthMiddleware, Token, encoded, send_json
from megatron_webrl.control.http.http_service import ConnectionLimits, ListenAddress, Listener, run_http_server
from megatron_webrl.control.journal import Journal, restore
from megatron_webrl.control.liveness import VIEWED, Liveness
from megatron_webrl.control.state import QUERIES, TICKETS, JobState

KEEP_ALIVE_SECONDS = 90.0  # longest time that ControlClient.keep_alive delays the exit after the end of the job
LINGER_SECONDS = 10.0  # after that, so that every role reads the outcome
TICK_SECONDS = 0.1
MAX_CHANGES = 2**40  # in one life of the service
MAX_BODY_BYTES = 64 * 2**20
LIMITS = ConnectionLimits(max_connections=16_384)  # a role has up to three connections
_INVALID = (ValueError, KeyError, TypeError, IndexError, AttributeError)  # raised for a body of another form

Handler = Callable[[Any, Request], Awaitable[bytes]]  # gets the body, returns the answer


class Unavailable(Exception):
    """The request cannot be answered now: status 503. The message says why."""


class ControlService:
    """Serves one job. Belongs to one event loop."""

    def __init__(self, state: JobState, journal: Journal, job_id: str, heartbeat_timeout_seconds: float) -> None:
        self.state, self.journal, self.job_id = state, journal, job_id
        self.liveness = Liveness(heartbeat_timeout_seconds)
        # Counted in the journal: revisions of facts grow over restarts of the service.
        number, command = state.request_count("service") + 1, ["add", "service/starts", 1]
        starts: int = state.apply("service", number, [command])[0]
        journal.append("service", number, [command], state)
        self._feed = FactFeed(starts * MAX_CHANGES)
        self._feed.merge([(key, value, self._feed.revision) for key, value in state.facts.items()], 0)
        self._feed.put("job", {"job_id": job_id, "heartbeat_timeout_seconds": heartbeat_timeout_seconds})
        self._items = asyncio.Event()  # wakes the claims that wait, each time that a queue has free items
        self._watched: dict[str, Any] = {}  # facts that the liveness of roles has made
        self.handlers: dict[str, Handler] = {
            "POST /sync": self._sync,
            "GET /status": self._status,
            "GET /rollouts": self._rollouts,
        }

    async def run(self) -> None:
        """Watch the heartbeats until the job has ended and its roles could read that."""
        while "end" not in self.state.facts:
            self._watch(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)
        for key, limit in (("keep_alive", KEEP_ALIVE_SECONDS), ("end", LINGER_SECONDS)):
            since = time.monotonic()
            while key in self.state.facts and time.monotonic() - since < limit and "shutdown" not in self.state.facts:
                self._watch(time.monotonic())
                await asyncio.sleep(TICK_SECONDS / 2)
        self._feed.release()

    async def _sync(self, body: Body, request: Request) -> bytes:
        replies: list[Any] = []
        self._hear(body, time.monotonic())
        if commands := body.get("commands"):
            stream, number = str(body["stream"]), int(body["number"])
            found = await self._has_items(stream, number, commands, body, request)
            replies = await self._apply(stream, number, commands) if found else [[]]
        else:
            await self._feed.wait(body)
        return self._feed.answer(body, replies)

    async def _has_items(self, stream: str, number: int, commands: Any, body: Body, request: Request) -> bool:
        """Wait until a claim, which is the only command, finds an item, as long as the request allows.

        Without one it needs no place in the journal. A claim of a process that has ended finds none.
        """
        if [command[0] for command in commands] != ["claim"] or not (seconds := wait_seconds(body)):
            return True
        deadline = time.monotonic() + seconds
        while not self.state.free_items(str(commands[0][1])) and self.state.request_count(stream) < number:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._items.wait()
            if time.monotonic() > deadline or await request.is_disconnected():
                return False
        return True

    async def _status(self, body: None, request: Request) -> bytes:
        state, now = self.state, time.monotonic()
        self._watch(now)  # the service may have been suspended until now
        queue, tickets = state.queues.get(TICKETS), None
        if queue is not None and state.epochs:
            tickets = {"claimed": queue.claimed, "limit": queue.appended, "in_progress": len(queue.owners)}
        return encoded(
            {
                "job_id": self.job_id,
                "end": state.facts.get("end"),
                "stop": state.facts.get("stop"),
                "tickets": tickets,
                "roles": self.liveness.to_json(now),
                "heartbeat_timeout_seconds": self.liveness.timeout_seconds,
                "journal_error": self.journal.error,
            }
        )

    async def _rollouts(self, body: None, request: Request) -> bytes:
        now = time.monotonic()
        self.liveness.look(now, request.query_params.getlist("episode"))
        self._watch(now)
        return encoded({"job_id": self.job_id, "workers": self.liveness.rollouts(now)})

    async def _apply(self, stream: str, number: int, commands: Any) -> list[Any]:
        if all(command[0] in QUERIES for command in commands):
            return self.state.query(commands)
        known = self.state.request_count(stream) >= number
        replies = self.state.apply(stream, number, commands)
        if not known:
            self.journal.append(stream, number, commands, self.state)
        changed, self.state.changed = self.state.changed, set()
        for key in changed:
            self._feed.put(key, self.state.facts.get(key))
        if any(queue.free for queue in self.state.queues.values()):
            self._items.set()
            self._items = asyncio.Event()
        await self.journal.sync()
        return replies

    def _hear(self, body: Body, now: float) -> None:
        for role in body.get("clear", ()):
            self.liveness.clear(str(role))
        roles = body.get("roles", {})
        for role, (age, report) in roles.items():
            self.liveness.report(role, now - float(age), report)
        if "clear" in body or any(f"silent/{role}" in self._watched for role in roles):
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Publish which roles are silent, and whether each was cleared, and what is looked at."""
        before = self._watched
        self._watched = {f"silent/{role}": cleared for role, cleared in self.liveness.silent_roles(now).items()}
        if (viewed := self.liveness.viewed(now)) is not None:
            self._watched[VIEWED] = viewed
        for key in before.keys() | self._watched.keys():
            if before.get(key) != self._watched.get(key):
                self._feed.put(key, self._watched.get(key))


def json_app(handlers: Mapping[str, Handler], token: Token) -> ASGIApp:
    """An application that serves JSON: a handler by method and path, such as "POST /sync". Needs the token."""

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

    return AuthMiddleware(app, token, lambda path: False, lambda text: encoded({"error": text}), MAX_BODY_BYTES)


def serve(
    host: str,
    port: int,
    job_id: str,
    address_file: Path,
    journal: Path,
    heartbeat_timeout_seconds: float = 60.0,
) -> None:
    """Run the service until the job has ended and its roles could read the outcome.

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

    async def run() -> None:
        opened = Journal(journal)
        service = ControlService(state, opened, job_id, heartbeat_timeout_seconds)
        app = json_app(service.handlers, Token(address_file.name, token))
        async with run_http_server(app, listener):
            address.write(address_file)
            await service.run()
        opened.close()

    asyncio.run(run())
