"""Network access of one episode: its proxy port, quotas, usage and refusals."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_webrl.browser.egress.egress_policy import EgressDenied, EgressPolicy, Endpoint, split_url
from megatron_webrl.browser.egress.har_replayer import HARReplayer
from megatron_webrl.config.browser import BrowserConfig

NOT_RECORDED = "not_recorded"  # reason of a refusal during replay
MAX_CONNECTIONS = 128  # at a time; Chromium opens at most 32 through one proxy, and as many WebSockets
MAX_LOOKUPS = 8  # at a time: slow names of one episode must not delay other episodes
MAX_ERRORS = 50
MAX_REPORTED_ERRORS = 3


@dataclass(frozen=True)
class NetworkError:
    """A refused request or an unreachable server."""

    host: str  # or empty
    message: str


@dataclass
class EgressTotals:
    """Counts over all episodes of a pool."""

    refused: Counter[str] = field(default_factory=Counter)  # by reason
    replayed: int = 0  # requests that recordings answered
    connections: int = 0  # to servers, attempts included; name look-ups belong to them


class NetworkAccess:
    """One episode's port of the egress proxy, with its request and byte counts."""

    def __init__(
        self, policy: EgressPolicy, declared: Mapping[Endpoint, Endpoint], settings: BrowserConfig, totals: EgressTotals
    ) -> None:
        """`declared`: endpoints of the task source. `totals` counts over all episodes."""
        self.egress_policy, self.declared = policy, declared
        self.port = 0
        self.requests = self.bytes = self.replayed = 0
        self.replayer: HARReplayer | None = None  # during replay, from the reset on
        self.unrecorded_urls: set[str] = set()  # requested during replay
        self.refused_urls: set[str] = set()  # of plain requests, which got an error page
        self.refused: Counter[str] = Counter()
        self.errors: deque[NetworkError] = deque(maxlen=MAX_ERRORS)  # not yet reported
        self.lookup_semaphore = asyncio.Semaphore(MAX_LOOKUPS)
        self.connections: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server | None = None
        self._settings, self._totals = settings, totals

    def refusal_reason(self, url: str) -> str | None:
        """Why a URL is refused before its name is resolved; None if it is not."""
        try:
            _, endpoint, _ = split_url(url)
            self.egress_policy.check_endpoint(endpoint, self.declared)
        except EgressDenied as refused:
            return str(refused)
        return None

    def count_request(self) -> None:
        """Count a request. Raises EgressDenied beyond browser.max_requests."""
        if self.requests >= self._settings.max_requests:
            raise EgressDenied(
                "requests", f"the episode has used its {self._settings.max_requests} requests (browser.max_requests)"
            )
        self.requests += 1

    def count_bytes(self, number: int) -> None:
        """Count bytes moved. Raises EgressDenied beyond browser.max_network_mib."""
        self.bytes += number
        if self.bytes > self._settings.max_network_mib << 20:
            raise EgressDenied(
                "bytes", f"the episode has used its {self._settings.max_network_mib} MiB (browser.max_network_mib)"
            )

    def count_connection(self) -> None:
        """Check the number of open connections. Raises EgressDenied beyond MAX_CONNECTIONS."""
        if len(self.connections) > MAX_CONNECTIONS:
            raise EgressDenied("connections", f"the episode has {MAX_CONNECTIONS} connections open")

    def count_replayed(self) -> None:
        """Count a request that a recording answered."""
        self.replayed += 1
        self._totals.replayed += 1

    def record_refusal(self, host: str, refused: EgressDenied) -> None:
        """Count a refusal and keep its message for the agent."""
        self.refused[refused.reason] += 1
        self._totals.refused[refused.reason] += 1
        self.record_error(host, str(refused))

    def record_error(self, host: str, message: str) -> None:
        """Keep the message of a failed connection for the agent."""
        self.errors.append(NetworkError(host, message))

    def take_errors(self, url: str) -> list[str]:
        """Messages since the last call about the host of `url`; for an error page, messages about all hosts."""
        try:
            host = split_url(url)[1].host
        except EgressDenied:
            host = ""
        messages = [error.message for error in self.errors if not host or error.host in ("", host)]
        self.errors.clear()
        return list(dict.fromkeys(reversed(messages)))[:MAX_REPORTED_ERRORS]

    def reset(self) -> None:
        """Clear counts and messages for another episode."""
        self.requests = self.bytes = self.replayed = 0
        self.refused.clear()
        self.refused_urls.clear()
        self.errors.clear()

    async def close(self) -> None:
        """Close the port and every connection of the episode. A second call does nothing."""
        if self.server is not None:
            self.server.close()
        for connection in self.connections:
            connection.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        if self.replayer is not None:
            self.replayer.close()
