"""What one episode may reach of the network, and what it has used and been refused."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_webrl.browser.egress.egress_policy import EgressDenied, EgressPolicy, Endpoint, split_url
from megatron_webrl.config.browser import BrowserConfig

MAX_CONNECTIONS = 128
"""Open at a time. Chromium itself holds 32 through one proxy, and as many WebSockets; other programs need no more."""

MAX_LOOKUPS = 8  # at a time: slow names of one episode must not hold up the others
MAX_ERRORS = 50
MAX_REPORTED_ERRORS = 3


@dataclass(frozen=True)
class NetworkError:
    """Something that was refused or could not be reached."""

    host: str  # or empty
    message: str


class NetworkAccess:
    """One episode's way to the network: an own port of the gateway. Counts what goes through it."""

    def __init__(
        self, policy: EgressPolicy, declared: Mapping[Endpoint, Endpoint], settings: BrowserConfig, totals: Counter[str]
    ) -> None:
        """`declared`: what the task source declares. `totals` counts refusals by reason, of all episodes."""
        self.egress_policy, self.declared = policy, declared
        self.port = 0
        self.requests = self.bytes = 0
        self.refused: Counter[str] = Counter()
        self.errors: deque[NetworkError] = deque(maxlen=MAX_ERRORS)  # those not told yet
        self.lookup_semaphore = asyncio.Semaphore(MAX_LOOKUPS)
        self.connections: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server | None = None
        self._settings, self._totals = settings, totals

    def refusal_reason(self, url: str) -> str | None:
        """Why an address may not be opened, as far as can be told before its name is looked up; None if it may."""
        try:
            _, endpoint, _ = split_url(url)
            self.egress_policy.check_endpoint(endpoint, self.declared)
        except EgressDenied as refused:
            return str(refused)
        return None

    def count_request(self) -> None:
        """Raises Refused for one too many."""
        if self.requests >= self._settings.max_requests:
            raise EgressDenied(
                "requests", f"the episode has used its {self._settings.max_requests} requests (browser.max_requests)"
            )
        self.requests += 1

    def count_bytes(self, number: int) -> None:
        """Raises Refused once the episode has moved more than it may."""
        self.bytes += number
        if self.bytes > self._settings.max_network_mib << 20:
            raise EgressDenied(
                "bytes", f"the episode has used its {self._settings.max_network_mib} MiB (browser.max_network_mib)"
            )

    def count_connection(self) -> None:
        """Raises Refused for one too many."""
        if len(self.connections) > MAX_CONNECTIONS:
            raise EgressDenied("connections", f"the episode has {MAX_CONNECTIONS} connections open")

    def record_refusal(self, host: str, refused: EgressDenied) -> None:
        """Count a refusal and keep it for the agent."""
        self.refused[refused.reason] += 1
        self._totals[refused.reason] += 1
        self.record_error(host, str(refused))

    def record_error(self, host: str, sentence: str) -> None:
        """Keep for the agent what went wrong on the way to a host."""
        self.errors.append(NetworkError(host, sentence))

    def take_errors(self, url: str) -> list[str]:
        """What went wrong since the last call and explains the page at `url`; an error page explains itself by all."""
        try:
            host = split_url(url)[1].host
        except EgressDenied:
            host = ""
        found = [trouble.message for trouble in self.errors if not host or trouble.host in ("", host)]
        self.errors.clear()
        return list(dict.fromkeys(reversed(found)))[:MAX_REPORTED_ERRORS]

    def reset(self) -> None:
        """Count anew, for another episode."""
        self.requests = self.bytes = 0
        self.refused.clear()
        self.errors.clear()

    async def close(self) -> None:
        """End every connection of the episode; its port no longer answers. A second call does nothing."""
        if self.server is not None:
            self.server.close()
        for conversation in self.connections:
            conversation.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
