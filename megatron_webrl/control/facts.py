"""Facts with revisions: the dictionary of a server, and the copy of the part that a client follows.

Each change of a fact has a revision, which grows over restarts of the service, too. A request names the facts that its
sender follows and the revision of its last answer; it waits until one of them changes, and the answer has the changed
ones. So an answer that is lost loses nothing, and a server keeps nothing of a client. A relay hands on the revisions of
the service: of two values the one with the newer revision counts, whichever server it came from.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_webrl.control.connection import Connection, ControlLost

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0  # between two requests of a role
MAX_WAIT_SECONDS = 5.0  # of a request that waits
RELEASED_WAIT_SECONDS = 0.1  # the same while the server ends
REQUESTS_PER_SECOND = 1000  # of those that wait: with more of them, heartbeats are less frequent
RELAY_SECONDS = 2.0  # for the relay to answer, beyond the time that the request may wait for
RELAY_PAUSE_SECONDS = 10.0  # without an answer, until the relay is asked again

Json = Any
Change = tuple[str, Json, int]  # key, value, revision
Body = Mapping[str, Any]
Reports = dict[str, tuple[float, dict[str, Any]]]  # by role: the heartbeat's age in seconds, and the report


class FactFeed:
    """The facts of a server, and the requests that wait for changes. Belongs to one event loop."""

    def __init__(self, revision: int = 0) -> None:
        """`revision`: of facts that have no value."""
        self.first_revision = self.revision = revision
        self.facts: dict[str, tuple[int, Json]] = {}
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)  # by key
        self._sessions: dict[str, asyncio.Event] = {}  # requests that wait
        self._max_wait_seconds = MAX_WAIT_SECONDS
        self._encoded: tuple[object, bytes] = (None, b"")  # facts of the last answer: most others have the same

    def put(self, key: str, value: Json) -> None:
        """A fact has changed."""
        self.merge([(key, value, self.revision + 1)], self.revision + 1)

    def merge(self, changes: Sequence[Change], revision: int) -> None:
        """Take in changes with their revisions; all up to `revision` are there then."""
        for key, value, changed_at in changes:
            self.facts[key] = changed_at, value
            for event in self._waiting.get(key, ()):
                event.set()
        self.revision = max(self.revision, revision)

    def release(self) -> None:
        """Answer the requests that wait, and let none wait for long any more, before the server ends."""
        self._max_wait_seconds = RELEASED_WAIT_SECONDS
        for event in self._sessions.values():
            event.set()

    async def wait(self, body: Body) -> None:
        """Wait until the sender lacks a change, or follows another fact, as long as it asks."""
        session, keys = str(body.get("session")), body.get("keys", ())
        if body.get("new") and session in self._sessions:
            self._sessions[session].set()
        if not (seconds := wait_seconds(body)) or self._news(body):
            return
        event = self._sessions[session] = asyncio.Event()
        for key in keys:
            self._waiting[key].add(event)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, self._max_wait_seconds)):
                    await event.wait()
        finally:
            for key in keys:
                self._waiting[key].discard(event)
            if self._sessions.get(session) is event:
                del self._sessions[session]

    def answer(self, body: Body, replies: Sequence[Json] = ()) -> bytes:
        """An answer with the changes that the sender lacks."""
        interval = max(HEARTBEAT_SECONDS, len(self._sessions) / REQUESTS_PER_SECOND)
        content = {"replies": replies, "revision": self.revision, "interval": interval}
        news = tuple(self._news(body))
        if self._encoded[0] != (news, self.revision):
            self._encoded = (news, self.revision), json.dumps({key: self._read(key) for key in news}).encode()
        return b'%s, "facts": %s}' % (json.dumps(content).encode()[:-1], self._encoded[1])

    def _news(self, body: Body) -> list[str]:
        known, new = int(body.get("revision", 0)), frozenset(body.get("new", ()))
        return [key for key in body.get("keys", ()) if key in new or self._read(key)[0] > known]

    def _read(self, key: str) -> tuple[int, Json]:
        return self.facts.get(key) or (self.first_revision, None)


def wait_seconds(body: Body) -> float:
    """For how long a request may wait."""
    return min(max(float(body.get("wait", 0.0)), 0.0), MAX_WAIT_SECONDS)


class FactFollower:
    """A client's copy of the facts that it follows, kept current by requests to the relay of its machine, or to the
    service while no relay answers. May be used by several threads.
    """

    def __init__(
        self,
        service: Connection,
        relay_port: int = 0,
        on_answer: Callable[[Sequence[Change], int], None] = lambda changes, revision: None,
    ) -> None:
        """`on_answer` is called with the changes of each answer, and the revision up to which all are known then."""
        self.facts: dict[str, tuple[int, Json]] = {}
        self.revision = 0  # all changes up to it are known
        self.interval = HEARTBEAT_SECONDS
        self.relay_answers = 0
        self._service, self._on_answer = service, on_answer
        self._followed: dict[str, None] = {}  # keys, also those whose first value is under way
        self._relay: Connection | None = None
        if relay_port:
            self._relay = Connection(service.address_file, service.role, RELAY_SECONDS, relay_port=relay_port)
        self._ask_relay_at = 0.0  # 0: it has answered
        self._session = secrets.token_hex(8)
        self._lock = threading.Lock()

    def follow(self, new: Sequence[str] = (), reports: Callable[[], Reports] = dict, wait: float = 0.0) -> None:
        """Send reports, and wait up to `wait` seconds for news; `new`: facts to follow, too. Raises ControlLost."""
        if self._relay is not None and time.monotonic() >= self._ask_relay_at:
            try:
                self._exchange(self._relay, new, reports, wait)
                self._ask_relay_at = 0.0
                self.relay_answers += 1
                return
            except ControlLost as error:
                if not self._ask_relay_at:
                    log.warning("%s; until it does, this role asks the control service itself", error)
                self._ask_relay_at = time.monotonic() + RELAY_PAUSE_SECONDS
        self._exchange(self._service, new, reports, wait)

    def request(self, new: Sequence[str] = ()) -> dict[str, Any]:
        """The fields of a request that concern facts."""
        with self._lock:  # the next request of another thread, too, waits for changes of the new ones
            self._followed |= dict.fromkeys(new)
            keys = list(self._followed)
        return {"session": self._session, "keys": keys, "new": list(new), "revision": self.revision}

    def merge(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Take in the news of an answer."""
        changed: list[Change] = []
        with self._lock:
            for key, (revision, value) in answer["facts"].items():
                known = self.facts.get(key)
                if known is None or revision >= known[0]:
                    self.facts[key] = revision, value
                    if known is None or value != known[1]:
                        changed.append((key, value, revision))
            self.interval = answer["interval"]
            if len(request["keys"]) == len(self._followed):  # otherwise another thread follows more facts since
                self.revision = max(self.revision, answer["revision"])
            self._on_answer(changed, self.revision)

    def _exchange(
        self, connection: Connection, new: Sequence[str], reports: Callable[[], Reports], wait: float
    ) -> None:
        sent: dict[str, Any] = {}

        def make_fields() -> dict[str, Any]:
            sent.update(self.request(new), roles=reports())
            return sent

        answer = connection.sync(make_fields=make_fields, wait_seconds=wait)
        self.merge(sent, answer)
