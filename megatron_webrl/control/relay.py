"""The relay of a node: its supervisor speaks with the control service for all the roles that it has started.

A role sends its heartbeats to the relay, on loopback and with the job's token (facts.py). The relay sends one request
for all of them: the reports that it has heard since its last one, and all facts that they follow. So a change wakes as
many requests at the service as there are nodes, not roles. Commands do not pass the relay.

A role is silent at the service exactly when the relay has not heard it: a report is sent once, with its age, so neither
a request that is sent again nor an outage makes a dead role look alive. A role asks the service itself while the relay
does not answer, so the end of a relay loses nothing. A relay that cannot reach the service for LOST_SECONDS refuses its
roles: they find out for themselves whether it is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request

from megatron_webrl.control.connection import Connection, ControlLost
from megatron_webrl.control.facts import Body, Change, FactFeed, FactFollower, Reports
from megatron_webrl.control.http.access import Token
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.control.server import Unavailable, json_app

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LOST_SECONDS = 30.0  # time without an answer of the service after which a relay refuses requests
PAUSE_SECONDS = 0.05  # between two requests: after a change the service answers all relays before it hears them again


class Relay:
    """Answers the heartbeats of roles. Belongs to one event loop; `follow` runs in a thread of its own."""

    def __init__(self, address_file: Path, name: str) -> None:
        """To be made in the event loop. `name` appears in errors."""
        self._loop, self._feed = asyncio.get_running_loop(), FactFeed()
        self._upstream = FactFollower(Connection(address_file, name, LOST_SECONDS), on_answer=self._merge)
        self._heard: dict[str, tuple[float, dict[str, Any]]] = {}  # time and report, by role, since the last request
        self._lock = threading.Lock()  # of the reports
        self._lost: str | None = None  # why roles are refused
        self.ended = False

    async def sync(self, body: Body, request: Request | None = None) -> bytes:
        """Take in the reports of a role, wait for news as long as it asks, and answer. Raises Unavailable."""
        if self._lost is not None:
            raise Unavailable(self._lost)
        now = time.monotonic()
        reports = {str(role): (now - float(age), dict(report)) for role, (age, report) in body["roles"].items()}
        with self._lock:
            self._heard |= reports
        if new := [key for key in body["keys"] if key not in self._feed.facts]:
            try:
                await asyncio.to_thread(self._upstream.follow, new)
            except ControlLost as error:
                raise Unavailable(str(error)) from error
        await self._feed.wait(body)
        return self._feed.answer(body)

    def follow(self) -> None:
        """Follow the facts of the service until the relay has ended."""
        try:
            while not self.ended:
                try:
                    self._upstream.follow((), self._take_reports, self._upstream.interval)
                    self._lost = None
                    time.sleep(PAUSE_SECONDS)
                except ControlLost as error:
                    self._lost = str(error)
        finally:
            self._lost = self._lost or "the relay has ended"

    def _take_reports(self) -> Reports:
        with self._lock:
            heard, self._heard = self._heard, {}
        now = time.monotonic()
        return {role: (now - heard_at, report) for role, (heard_at, report) in heard.items()}

    def _merge(self, changes: Sequence[Change], revision: int) -> None:
        self._loop.call_soon_threadsafe(self._feed.merge, changes, revision)


def start_relay(address_file: Path, name: str) -> int:
    """Start a relay in threads of this process; returns its port. It serves once the control service has answered.

    It listens at once, and while the process lives: no other can take the port, and get the token from roles that look
    for the relay. Raises ConfigError.
    """
    listener = Listener(ListenAddress(HOST, 0))
    os.dup(listener.socket.fileno())  # stays open

    async def serve(token: Token) -> None:
        relay = Relay(address_file, name)
        threading.Thread(target=relay.follow, name="relay-upstream", daemon=True).start()
        async with run_http_server(json_app({"POST /sync": relay.sync}, token), listener) as ended:
            await ended.wait()

    def run() -> None:
        try:
            address = Connection(address_file, name).connect()  # the file may be of an earlier job before
        except ControlLost as error:
            log.warning("no relay: %s", error)
        else:
            asyncio.run(serve(Token(address_file.name, address.token)))

    threading.Thread(target=run, name="relay", daemon=True).start()
    return int(listener.socket.getsockname()[1])
