"""The relay of a node: its supervisor exchanges with the control service for all the roles that it has started.

A role sends its `/exchange` to the relay, on loopback and with the job's token (exchanger.py). The relay sends one
exchange for all of them: the reports that it has heard since its last one, and the union of the subscriptions. News
arrive once and are handed to the roles that subscribe to them. So a change wakes as many requests at the service as
there are nodes, not roles.

What holds with a relay as without one:

- A role that has claimed a ticket knows all facts from before the claim. Claims and commands do not pass the relay:
  their answers carry the news of a session that the role has at the service itself, and the role asks again if the
  service has forgotten that session. Facts have revisions, so that older news, which the relay may hand out later,
  change nothing.
- A role is silent at the service exactly when the relay has not heard it. A report is sent once, with its age: neither
  an exchange that is sent again nor an outage makes a dead role look alive. As a pause of the service, a pause of the
  relay does not count as silence of its roles, which exchange with the service meanwhile.
- A role exchanges with the service itself while the relay does not answer, so the end of a relay loses nothing. A relay
  that cannot reach the service for LOST_SECONDS refuses its roles: they find out for themselves whether it is lost.
- A hung role whose heartbeats continue shows by its progress, which is part of its report.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request

from megatron_webrl.control.connection import Connection, ControlLost
from megatron_webrl.control.exchanger import Exchanger, Reports, no_reports
from megatron_webrl.control.fact_cache import FactCache
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server
from megatron_webrl.control.http.tokens import Token
from megatron_webrl.control.subscriptions import Body, Subscriptions, Unavailable, json_app

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LOST_SECONDS = 30.0  # time without an answer of the service after which a relay refuses exchanges
TICK_SECONDS = 1.0
PAUSE_SECONDS = 0.05  # between two exchanges: after a change the service answers all relays before it hears them again


class Relay:
    """Answers exchanges of roles. Belongs to one event loop; `follow` runs in a thread of its own."""

    def __init__(self, address_file: Path, name: str) -> None:
        """To be made in the event loop. `name` appears in errors."""
        self._loop = asyncio.get_running_loop()
        self._cache = FactCache(name, self._changed)
        self._subscriptions = Subscriptions(self._cache.read)
        self._upstream = Exchanger(self._cache, address_file, name, LOST_SECONDS)
        self._first_reads = Exchanger(self._cache, address_file, name, LOST_SECONDS)  # must not wait for news
        self._heard: dict[str, tuple[float, dict[str, Any]]] = {}  # time and report, by role, since the last exchange
        self._lock = threading.Lock()  # of the reports
        self._lost: str | None = None  # why roles are refused
        self.ended = False

    async def exchange(self, body: Body, request: Request | None = None) -> bytes:
        """Take in the reports of a role, wait for news as long as it asks, and answer. Raises Unavailable."""
        if self._lost is not None:
            raise Unavailable(self._lost)
        now = time.monotonic()
        reports = {str(role): (now - float(age), dict(report)) for role, (age, report) in body["roles"].items()}
        with self._lock:
            self._heard |= reports
        if new := [key for key in body.get("subscribe", ()) if key not in self._cache]:
            try:
                await asyncio.to_thread(self._first_reads.exchange, no_reports, 0.0, new)
            except ControlLost as error:
                raise Unavailable(str(error)) from error
        await self._subscriptions.wait(body)
        return self._subscriptions.answer(body, times=self._upstream.clock.stamp(now))

    def follow(self) -> None:
        """Exchange with the service until the relay has ended."""
        try:
            while not self.ended:
                try:
                    self._upstream.exchange(self._take_reports, self._cache.interval)
                    self._lost = None
                    time.sleep(PAUSE_SECONDS)
                except ControlLost as error:
                    self._lost = str(error)
        finally:
            self._lost = self._lost or "the relay has ended"

    async def forget_old_sessions(self) -> None:
        """Forget sessions that have ended, until the relay has."""
        while not self.ended:
            self._subscriptions.forget_old(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)

    def _take_reports(self) -> Reports:
        with self._lock:
            heard, self._heard = self._heard, {}
        now = time.monotonic()
        return {role: (now - heard_at, report) for role, (heard_at, report) in heard.items()}

    def _changed(self, key: str) -> None:
        self._loop.call_soon_threadsafe(self._subscriptions.publish, key)


class RelayThread:
    """A relay in threads of this process. Serves from the time at which the control service first answers."""

    def __init__(self, address_file: Path, name: str) -> None:
        """Listens at once, and while the process lives: no other can take the port, and get the token from roles that
        look for the relay. Raises ConfigError.
        """
        self._address_file, self._name = address_file, name
        self._listener = Listener(ListenAddress(HOST, 0))
        os.dup(self._listener.socket.fileno())  # stays open
        self.port: int = self._listener.socket.getsockname()[1]
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def _run(self) -> None:
        connection = Connection(self._address_file, self._name)
        try:
            connection.job()  # the file may be that of an earlier job until then
        except ControlLost as error:
            log.warning("no relay: %s", error)
            return
        assert connection.address is not None
        asyncio.run(self._serve(Token("job", self._address_file.name, connection.address.token)))

    async def _serve(self, token: Token) -> None:
        relay = Relay(self._address_file, self._name)
        threading.Thread(target=relay.follow, name="relay-upstream", daemon=True).start()
        async with run_http_server(json_app({"POST /exchange": relay.exchange}, token), self._listener):
            await relay.forget_old_sessions()
