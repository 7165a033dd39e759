"""What one episode may reach of the network, and what it has used and been refused."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_webrl.browser.policy import Endpoint, Policy, Refused, split_url
from megatron_webrl.config import BrowserConfig

CONNECTIONS = 128
"""Open at a time. Chromium itself holds 32 through one proxy, and as many WebSockets; other programs need no more."""

LOOKUPS = 8  # at a time: slow names of one episode must not hold up the others
KEPT_TROUBLES = 50
TOLD_TROUBLES = 3


@dataclass(frozen=True)
class Trouble:
    """Something that was refused or could not be reached."""

    host: str  # or empty
    sentence: str


class Access:
    """One episode's way to the network: an own port of the gateway. Counts what goes through it."""

    def __init__(
        self, policy: Policy, declared: Mapping[Endpoint, Endpoint], settings: BrowserConfig, totals: Counter[str]
    ) -> None:
        """`declared`: what the task source declares. `totals` counts refusals by reason, of all episodes."""
        self.policy, self.declared = policy, declared
        self.port = 0
        self.requests = self.bytes = 0
        self.refused: Counter[str] = Counter()
        self.troubles: deque[Trouble] = deque(maxlen=KEPT_TROUBLES)  # those not told yet
        self.lookups = asyncio.Semaphore(LOOKUPS)
        self.conversations: set[asyncio.Task[None]] = set()
        self.listening: asyncio.Server | None = None
        self._settings, self._totals = settings, totals

    def refusal(self, url: str) -> str | None:
        """Why an address may not be opened, as far as can be told before its name is looked up; None if it may."""
        try:
            _, endpoint, _ = split_url(url)
            self.policy.check_endpoint(endpoint, self.declared)
        except Refused as refused:
            return str(refused)
        return None

    def count_request(self) -> None:
        """Raises Refused for one too many."""
        if self.requests >= self._settings.max_requests:
            raise Refused(
                "requests", f"the episode has used its {self._settings.max_requests} requests (browser.max_requests)"
            )
        self.requests += 1

    def count_bytes(self, number: int) -> None:
        """Raises Refused once the episode has moved more than it may."""
        self.bytes += number
        if self.bytes > self._settings.max_mib << 20:
            raise Refused("bytes", f"the episode has used its {self._settings.max_mib} MiB (browser.max_mib)")

    def count_connection(self) -> None:
        """Raises Refused for one too many."""
        if len(self.conversations) > CONNECTIONS:
            raise Refused("connections", f"the episode has {CONNECTIONS} connections open")

    def note_refusal(self, host: str, refused: Refused) -> None:
        """Count a refusal and keep it for the agent."""
        self.refused[refused.reason] += 1
        self._totals[refused.reason] += 1
        self.note_failure(host, str(refused))

    def note_failure(self, host: str, sentence: str) -> None:
        """Keep for the agent what went wrong on the way to a host."""
        self.troubles.append(Trouble(host, sentence))

    def news(self, url: str) -> list[str]:
        """What went wrong since the last call and explains the page at `url`; an error page explains itself by all."""
        try:
            host = split_url(url)[1].host
        except Refused:
            host = ""
        found = [trouble.sentence for trouble in self.troubles if not host or trouble.host in ("", host)]
        self.troubles.clear()
        return list(dict.fromkeys(reversed(found)))[:TOLD_TROUBLES]

    def renew(self) -> None:
        """Count anew, for another episode."""
        self.requests = self.bytes = 0
        self.refused.clear()
        self.troubles.clear()

    async def close(self) -> None:
        """End every connection of the episode; its port no longer answers. A second call does nothing."""
        if self.listening is not None:
            self.listening.close()
        for conversation in self.conversations:
            conversation.cancel()
        await asyncio.gather(*self.conversations, return_exceptions=True)
