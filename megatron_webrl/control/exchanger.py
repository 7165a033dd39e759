"""Exchanges of a client with the relay of its machine, or with the control service while no relay answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_webrl.control.clock import ServiceClock
from megatron_webrl.control.connection import Connection, ControlLost
from megatron_webrl.control.fact_cache import FactCache, Server

log = logging.getLogger(__name__)

RELAY_SECONDS = 2.0  # for the relay to answer, beyond the time that the request may wait for
RELAY_PAUSE_SECONDS = 10.0  # without an answer, until the relay is asked again

Reports = dict[str, tuple[float, dict[str, Any]]]  # by role: the heartbeat's age in seconds, and the report


def no_reports() -> Reports:
    return {}


class Exchanger:
    """Keeps a cache of facts current, and passes on reports. A thread that waits for news has one of its own."""

    def __init__(
        self, cache: FactCache, address_file: Path, name: str, lost_seconds: float, relay_port: int = 0
    ) -> None:
        """`relay_port` of this machine; 0 without a relay."""
        self.clock = ServiceClock()
        self._cache = cache
        self._service = Connection(address_file, name, lost_seconds)
        self._relay = Connection(address_file, name, RELAY_SECONDS, relay_port=relay_port) if relay_port else None
        self._ask_relay_at = 0.0  # 0: it has answered

    def exchange(self, reports: Callable[[], Reports], wait_seconds: float, keys: Iterable[str] = ()) -> None:
        """Send reports and subscribe to more keys; waits up to `wait_seconds` for news. Raises ControlLost."""
        self._cache.subscribe(keys)
        if self._relay is not None and time.monotonic() >= self._ask_relay_at:
            try:
                self._exchange(self._relay, self._cache.relay, reports, wait_seconds)
                self._ask_relay_at = 0.0
                return
            except ControlLost as error:
                if not self._ask_relay_at:
                    log.warning("%s; until it does, exchanges are with the control service itself", error)
                self._ask_relay_at = time.monotonic() + RELAY_PAUSE_SECONDS
        self._exchange(self._service, self._cache.service, reports, wait_seconds)

    def _exchange(
        self, connection: Connection, server: Server, reports: Callable[[], Reports], wait_seconds: float
    ) -> None:
        def make_body() -> dict[str, Any]:
            return self._cache.request(server) | {"roles": reports(), "sent": time.monotonic()}

        request, answer = connection.exchange(make_body, wait_seconds)
        self.clock.add(request["sent"], answer.get("times"), time.monotonic())
        self._cache.merge(server, request, answer)
