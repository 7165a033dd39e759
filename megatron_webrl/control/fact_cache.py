"""The facts that a client has read, kept current by the answers of the control service and of a relay."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any


@dataclass
class Server:
    """What a server, the service or a relay, and this client know of each other."""

    id: str = ""  # of its process
    number: int = 0  # of its changes that the client has
    missing: set[str] = field(default_factory=set)  # keys that the client has yet to subscribe to


class FactCache:
    """Values by subscribed key. May be used by several threads.

    Revisions of facts grow, over restarts of the service too, and a relay passes them on: of two answers the later one
    counts, in whichever order and from whichever server they arrive.
    """

    def __init__(self, name: str, on_change: Callable[[str], None] = lambda key: None) -> None:
        """`on_change` is called with the key of each fact whose value has changed."""
        self.session = f"{name}-{secrets.token_hex(8)}"
        self.interval = 1.0  # seconds between two exchanges
        self.service, self.relay = Server(), Server()
        self._facts: dict[str, tuple[int, Json]] = {}  # revision and value; revision 0: not known yet
        self._on_change = on_change
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        """Whether the value of a key is known, which may be None."""
        return self._facts.get(key, (0, None))[0] > 0

    def __getitem__(self, key: str) -> Json:
        return self._facts[key][1]

    def read(self, key: str) -> tuple[int, Json]:
        """Revision and value."""
        return self._facts[key]

    def subscribe(self, keys: Iterable[str]) -> None:
        """Have the next request to each server subscribe to these keys."""
        with self._lock:
            new = [key for key in keys if key not in self._facts]
            self._facts |= dict.fromkeys(new, (0, None))
            self.service.missing.update(new)
            self.relay.missing.update(new)

    def request(self, server: Server) -> dict[str, Any]:
        """The fields of a request to a server that concern subscriptions."""
        with self._lock:
            subscribe = list(server.missing)
        return {"session": self.session, "subscribe": subscribe, "server": server.id, "known": server.number}

    def merge(self, server: Server, request: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
        """Take in the news of an answer. False if the server lacks subscriptions, and the answer therefore news."""
        with self._lock:
            if answer["server"] == server.id:
                server.number = max(server.number, answer["number"])
            else:  # the first answer, or the server was started again
                server.id, server.number = answer["server"], answer["number"]
            server.missing.difference_update(request["subscribe"])
            if answer["subscriptions"] < len(self._facts) - len(server.missing):
                server.missing = set(self._facts)
            changed = []
            for key, (revision, value) in answer["facts"].items():
                known = self._facts.get(key, (0, None))
                if revision >= known[0]:
                    self._facts[key] = revision, value
                    if known[0] == 0 or value != known[1]:
                        changed.append(key)
            self.interval = answer["interval"]
            complete = not server.missing
        for key in changed:
            self._on_change(key)
        return complete
