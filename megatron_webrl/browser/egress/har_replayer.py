"""Answer the requests of an episode from the recorded visits of its task."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from megatron_webrl.browser.egress.har_archive import (
    FAILED_STATUS,
    Exchange,
    RecordedResponse,
    RequestKey,
    Visit,
    open_visits,
    request_key,
)
from megatron_webrl.browser.egress.http1 import FRAMING_HEADERS, HOP_BY_HOP_HEADERS
from megatron_webrl.types import Task

FORM_TYPE = "application/x-www-form-urlencoded"
# Bodies are replayed decoded and unframed. The other headers make the browser contact servers outside of any page.
_DROPPED_HEADERS = (
    FRAMING_HEADERS | HOP_BY_HOP_HEADERS | {"content-encoding", "alt-svc", "nel", "report-to", "reporting-endpoints"}
)
_EXPIRES = re.compile(r"(;\s*expires\s*=\s*)([^;]+)", re.IGNORECASE)


@dataclass(frozen=True)
class ReplayRequest:
    """A request of a page, as the proxy received it."""

    method: str
    url: str
    content_type: str = ""
    body: bytes = b""
    byte_range: str = ""  # value of the Range header, or empty

    @property
    def key(self) -> RequestKey:
        return request_key(self.method, self.url, self.content_type, self.body, self.byte_range)


@dataclass(frozen=True)
class ReplayedResponse:
    """A recorded response, ready to be sent."""

    status: int  # FAILED_STATUS: the recorded request got no response
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class HARReplayer:
    """The recorded responses of a task's visits, looked up request by request. `close` closes the files.

    A request is answered as in the first visit that made it, in the order of that visit; the last response repeats.
    """

    def __init__(self, visits: Sequence[Visit], ignored: Sequence[str] = ()) -> None:
        """`ignored`: query parameters that are left out where nothing matches with them; * stands for any text."""
        self.clock_ms = visits[0].clock_ms
        self._visits, self._ignored = visits, tuple(ignored)
        self._seconds_ago = time.time() - self.clock_ms / 1000
        self._exact, self._reduced = _ResponseIndex(), _ResponseIndex()
        for visit in visits:
            self._exact.add((exchange.key, exchange.response) for exchange in visit.exchanges)
            if ignored:
                self._reduced.add((self._reduced_key(_request(each)), each.response) for each in visit.exchanges)

    @classmethod
    async def open(cls, folder: Path, task: Task, ignored: Sequence[str] = ()) -> HARReplayer:
        """Read the visits of a task. Raises NotRecorded."""
        return await asyncio.to_thread(lambda: cls(open_visits(folder, task), ignored))

    async def find(self, request: ReplayRequest) -> ReplayedResponse | None:
        """The next response to a request; None if it was not recorded. Raises NotRecorded for a damaged file."""
        response = self._exact.next(request.key)
        if response is None and self._ignored:
            response = self._reduced.next(self._reduced_key(request))
        if response is None:
            return None
        body = await asyncio.to_thread(self._visits[response.visit].read_body, response)
        return ReplayedResponse(response.status, response.reason, self._headers(response), body)

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        for visit in self._visits:
            visit.close()

    def _reduced_key(self, request: ReplayRequest) -> RequestKey:
        parts, body = urlsplit(request.url), request.body
        url = urlunsplit(parts._replace(query=self._reduced_query(parts.query)))
        if request.content_type.split(";")[0].strip().lower() == FORM_TYPE:
            body = self._reduced_query(body.decode(errors="replace")).encode()
        return request_key(request.method, url, request.content_type, body, request.byte_range)

    def _reduced_query(self, query: str) -> str:
        pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
        kept = [pair for pair in pairs if not any(fnmatchcase(pair[0], pattern) for pattern in self._ignored)]
        return urlencode(kept, errors="surrogateescape")

    def _headers(self, response: RecordedResponse) -> tuple[tuple[str, str], ...]:
        headers = []
        for name, value in response.headers:
            if name == "set-cookie":  # several cookies of a response may be joined by line feeds
                headers += [(name, _EXPIRES.sub(self._moved_expiry, cookie)) for cookie in value.split("\n")]
            elif name not in _DROPPED_HEADERS and not name.startswith(":"):
                headers.append((name, value.replace("\n", ", ")))
        return tuple(headers)

    def _moved_expiry(self, expires: re.Match[str]) -> str:
        """The expiry of a cookie, later by the time since the visit: the browser's clock is not replayed."""
        try:
            moment = parsedate_to_datetime(expires[2]).timestamp() + self._seconds_ago
            return expires[1] + format_datetime(datetime.fromtimestamp(moment, UTC), usegmt=True)
        except (ValueError, TypeError, OverflowError, OSError):
            return expires[0]


class _ResponseIndex:
    """Responses by request: of each request those of the first visit that got an answer."""

    def __init__(self) -> None:
        self._responses: dict[RequestKey, list[RecordedResponse]] = {}
        self._asked: Counter[RequestKey] = Counter()

    def add(self, exchanges: Iterable[tuple[RequestKey, RecordedResponse]]) -> None:
        """Add the exchanges of the next visit."""
        added: dict[RequestKey, list[RecordedResponse]] = {}
        for key, response in exchanges:
            added.setdefault(key, []).append(response)
        for key, responses in added.items():
            answered = [each for each in responses if each.status != FAILED_STATUS]
            earlier = self._responses.get(key)
            if earlier is None or (answered and earlier[0].status == FAILED_STATUS):
                self._responses[key] = answered or responses

    def next(self, key: RequestKey) -> RecordedResponse | None:
        responses = self._responses.get(key)
        if responses is None:
            return None
        self._asked[key] += 1
        return responses[min(self._asked[key], len(responses)) - 1]


def _request(exchange: Exchange) -> ReplayRequest:
    key = exchange.key
    return ReplayRequest(key.method, key.url, exchange.content_type, exchange.body, key.byte_range)
