"""The control service of a job: the facts, tickets and heartbeats of its roles, over HTTP. No data passes through it.

    POST /commands   run commands of the state machine (state.py); each request once, however often it is sent
    POST /claim      the same for one `claim`, which waits until there is an item to claim
    POST /exchange   heartbeats and reports of roles; waits until one of the facts that the sender subscribes to changes
    GET  /job        what does not change of the job
    GET  /status     the whole job at a glance
    GET  /rollouts   what each rollout does; for this, workers report them while someone asks (viewers.py)

Every reply to a POST carries what has changed of the facts that the sender's session subscribes to
(subscriptions.py), so that a role which has claimed a ticket knows all facts from before the claim. On a cluster the
supervisor of a node exchanges for all of its roles (relay.py). docs/architecture.md describes the use, docs/security.md
the token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from starlette.requests import Request

from megatron_webrl.control import clock
from megatron_webrl.control.address import ControlAddress
from megatron_webrl.control.http.connections import ConnectionLimits
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.control.http.json_bodies import encoded
from megatron_webrl.control.http.tokens import Token
from megatron_webrl.control.journal import Journal, restore
from megatron_webrl.control.liveness import Liveness
from megatron_webrl.control.state import QUERIES, TICKETS, JobState
from megatron_webrl.control.subscriptions import Body, Handler, Subscriptions, json_app, wait_seconds
from megatron_webrl.control.viewers import VIEWED, Viewers

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 90.0  # longest time that ControlClient.keep_alive delays the exit after the end of the job
LINGER_SECONDS = 10.0  # after that, so that every role reads the outcome
TICK_SECONDS = 0.1
MAX_CHANGES = 2**40  # in one life of the service
LIMITS = ConnectionLimits(max_connections=16_384, max_per_address=8192)  # a role has up to three connections


class ControlService:
    """Serves one job. Belongs to one event loop."""

    def __init__(self, state: JobState, journal: Journal, job_id: str, heartbeat_timeout_seconds: float) -> None:
        self.state, self.journal, self.job_id = state, journal, job_id
        self.liveness = Liveness(heartbeat_timeout_seconds)
        # Counted in the journal: revisions of facts grow over restarts of the service.
        number, command = state.request_count("service") + 1, ["add", "service/starts", 1]
        self._starts: int = state.apply("service", number, [command])[0]
        journal.append("service", number, [command], state)
        self._silent: dict[str, bool] = {}  # whether it was cleared, by silent role
        self._viewers = Viewers()
        self._viewed: dict[str, Any] | None = None  # value of VIEWED
        self._subscriptions = Subscriptions(self._read)
        self._free_items: defaultdict[str, asyncio.Condition] = defaultdict(asyncio.Condition)  # by queue
        self.handlers: dict[str, Handler] = {
            "POST /commands": self._commands,
            "POST /claim": self._claim,
            "POST /exchange": self._exchange,
            "GET /job": self._job,
            "GET /status": self._status,
            "GET /rollouts": self._rollouts,
        }

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

    async def _commands(self, body: Body, request: Request) -> bytes:
        replies = await self._apply(str(body["stream"]), int(body["number"]), body["commands"])
        return self._subscriptions.answer(body, replies)

    async def _claim(self, body: Body, request: Request) -> bytes:
        """A claim that finds no item waits without a place in the journal."""
        stream, number, arguments = str(body["stream"]), int(body["number"]), body["arguments"]
        name, deadline = str(arguments[0]), time.monotonic() + wait_seconds(body)
        available = self._free_items[name]
        while not self.state.free_items(name) and not self.state.is_applied(stream, number):
            timed_out = False
            async with available:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await available.wait()
                except TimeoutError:
                    timed_out = True
                if timed_out or await request.is_disconnected():
                    available.notify()  # another one takes its turn, if it had one
                    return self._subscriptions.answer(body, [[]])
        return self._subscriptions.answer(body, await self._apply(stream, number, [["claim", *arguments]]))

    async def _exchange(self, body: Body, request: Request) -> bytes:
        now, is_silent = time.monotonic(), False
        for role in body.get("clear", ()):
            self.liveness.clear(str(role))
        for role, (age, report) in body.get("roles", {}).items():
            self.liveness.report(role, now - float(age), report)
            is_silent = is_silent or role in self._silent
        if is_silent or "clear" in body:
            self._watch(now)
        await self._subscriptions.wait(body)
        return self._subscriptions.answer(body, times=clock.stamp(now))

    async def _job(self, body: None, request: Request) -> bytes:
        return encoded({"job_id": self.job_id, "heartbeat_timeout_seconds": self.liveness.timeout_seconds})

    async def _status(self, body: None, request: Request) -> bytes:
        state, now = self.state, time.monotonic()
        self._watch(now)  # the service may have been suspended until now
        queue, tickets = state.queues.get(TICKETS), None
        if queue is not None and state.epochs:
            tickets = {"claimed": queue.claimed, "limit": queue.appended, "in_progress": len(queue.owners)}
        instances = {
            key.removeprefix("instances/"): n for key, n in state.facts.items() if key.startswith("instances/")
        }
        return encoded(
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

    async def _rollouts(self, body: None, request: Request) -> bytes:
        now = time.monotonic()
        self._viewers.look(now, request.query_params.getlist("episode"))
        self._watch(now)
        return encoded({"job_id": self.job_id, "workers": self.liveness.rollouts(now)})

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
            self._subscriptions.publish(key)
        for queue in (key for key in changed if self.state.free_items(key)):
            async with self._free_items[queue]:
                self._free_items[queue].notify(self.state.free_items(queue))
        await self.journal.sync()
        return replies

    def _watch(self, now: float) -> None:
        """Publish which roles are silent and what is looked at, and forget sessions that have ended."""
        before, self._silent = self._silent, self.liveness.silent_roles(now)
        for role in before.keys() | self._silent.keys():
            if before.get(role) != self._silent.get(role):
                self._subscriptions.publish(f"silent/{role}")
        viewed, self._viewed = self._viewed, self._viewers.fact(now)
        if viewed != self._viewed:
            self._subscriptions.publish(VIEWED)
        self._subscriptions.forget_old(now)

    def _read(self, key: str) -> tuple[int, Any]:
        revision = self._starts * MAX_CHANGES + self._subscriptions.number
        if key.startswith("silent/"):
            return revision, self._silent.get(key.removeprefix("silent/"))
        return revision, self._viewed if key == VIEWED else self.state.facts.get(key)


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
    async with run_http_server(json_app(service.handlers, token), listener):
        address.write(address_file)
        await service.run(seconds)
    opened.close()
