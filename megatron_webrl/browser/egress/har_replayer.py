"""Answer the requests of an episode from the recorded visits of its task."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
_HEAD_HEADERS = frozenset({"content-length", "content-encoding"})  # kept in a response to HEAD, which has no body
_DATES = frozenset({"date", "expires", "last-modified"})  # they decide how long the browser's cache keeps a response
_EXPIRES = re.compile(r"(;\s*expires\s*=\s*)([^;]+)", re.IGNORECASE)


@dataclass(frozen=True)
class ReplayRequest:
    """A request of a page, as the proxy received it."""

    method: str
    url: str
    content_type: str = ""
    body: bytes | None = b""  # None: unknown
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
    given_up: bool = False  # by the page: the rest of the response, or all of it with FAILED_STATUS, does not come


class HARReplayer:
    """The recorded responses of a task's visits, looked up request by request. `close` closes the files.

    A request is answered as in the first visit that made it, in the order of that visit; the last response repeats.
    """

    def __init__(self, visits: Sequence[Visit], ignored: Sequence[str] = ()) -> None:
        """`ignored`: query parameters that are left out where nothing matches with them; * stands for any text."""
        self.clock_ms = visits[0].clock_ms
        self._visits, self._ignored = visits, tuple(ignored)
        self.seconds_ago = int(time.time() - self.clock_ms / 1000)  # age of the recording: dates are moved by it
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
        response = self._next(request)
        if response is None and request.body:
            response = self._next(replace(request, body=None))
        if response is None:
            return None
        body = await asyncio.to_thread(self._visits[response.visit].read_body, response)
        headers = self._headers(response, request.method)
        return ReplayedResponse(response.status, response.reason, headers, body, response.given_up)

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        for visit in self._visits:
            visit.close()

    def _next(self, request: ReplayRequest) -> RecordedResponse | None:
        response = self._exact.next(request.key)
        if response is None and self._ignored:
            response = self._reduced.next(self._reduced_key(request))
        return response

    def _reduced_key(self, request: ReplayRequest) -> RequestKey:
        parts, body = urlsplit(request.url), request.body
        url = urlunsplit(parts._replace(query=self._reduced_query(parts.query)))
        if body and request.content_type.split(";")[0].strip().lower() == FORM_TYPE:
            body = self._reduced_query(body.decode(errors="replace")).encode()
        return request_key(request.method, url, request.content_type, body, request.byte_range)

    def _reduced_query(self, query: str) -> str:
        pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
        kept = [pair for pair in pairs if not any(fnmatchcase(pair[0], pattern) for pattern in self._ignored)]
        return urlencode(kept, errors="surrogateescape")

    def _headers(self, response: RecordedResponse, method: str) -> tuple[tuple[str, str], ...]:
        dropped = _DROPPED_HEADERS - _HEAD_HEADERS if method == "HEAD" else _DROPPED_HEADERS
        headers = []
        for name, value in response.headers:
            if name == "set-cookie":  # several cookies of a response may be joined by line feeds
                headers += [(name, _EXPIRES.sub(self._moved_expiry, cookie)) for cookie in value.split("\n")]
            elif name in _DATES:
                headers.append((name, self._moved(value)))
            elif name not in dropped and not name.startswith(":"):
                headers.append((name, value.replace("\n", ", ")))
        return tuple(headers)

    def _moved_expiry(self, expires: re.Match[str]) -> str:
        return expires[1] + self._moved(expires[2])

    def _moved(self, date: str) -> str:
        """A date, later by the age of the recording: the browser's clock is not replayed."""
        try:
            moment = parsedate_to_datetime(date).timestamp() + self.seconds_ago
            return format_datetime(datetime.fromtimestamp(moment, UTC), usegmt=True)
        except (ValueError, TypeError, OverflowError, OSError):
            return date


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
            answered = any(each.complete for each in responses)
            if key not in self._responses or (answered and not any(each.complete for each in self._responses[key])):
                kept = [each for each in responses if each.status != FAILED_STATUS or each.given_up or not answered]
                self._responses[key] = kept

    def next(self, key: RequestKey) -> RecordedResponse | None:
        responses = self._responses.get(key)
        if responses is None:
            return None
        self._asked[key] += 1
        if self._asked[key] <= len(responses):
            return responses[self._asked[key] - 1]
        return next((each for each in reversed(responses) if each.complete), responses[-1])


def _request(exchange: Exchange) -> ReplayRequest:
    key = exchange.key
    return ReplayRequest(key.method, key.url, exchange.content_type, exchange.body, key.byte_range)
