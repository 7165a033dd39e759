"""HTTP/1.1 messages as a proxy sees them: heads, and where bodies end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

MAX_HEAD_BYTES = 65536  # the reader's limit: no head, chunk line or trailer may be longer
BUFFER_BYTES = 65536
CHUNKED = -1
UNTIL_CLOSE = -2

HOP_BY_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te", "upgrade"}
)
FRAMING_HEADERS = frozenset({"content-length", "transfer-encoding"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST = re.compile(r"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.[01]")
_STATUS = re.compile(r"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: (.*))?")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


class MalformedHTTP(Exception):
    """Bytes that are not HTTP/1.1, or that different readers would understand differently."""


@dataclass(frozen=True)
class HTTPHead:
    """First line and headers of a message."""

    start_line: str
    headers: tuple[tuple[str, str], ...]
    size: int  # bytes

    def header_values(self, name: str) -> list[str]:
        """The comma-separated words of all headers of that name, in lower case."""
        values = [value for key, value in self.headers if key.lower() == name]
        return [word.strip().lower() for value in values for word in value.split(",") if word.strip()]

    def parse_request_line(self) -> tuple[str, str]:
        """Method and target. Raises BadMessage."""
        found = _REQUEST.fullmatch(self.start_line)
        if not found:
            raise MalformedHTTP("not a request line")
        return found[1], found[2]

    def parse_status_line(self) -> tuple[int, str, bool]:
        """Code, reason, and whether the server speaks HTTP/1.1. Raises BadMessage."""
        found = _STATUS.fullmatch(self.start_line)
        if not found:
            raise MalformedHTTP("not a status line")
        return int(found[2]), found[3] or "", found[1] == "1"

    def end_to_end_headers(self, keep: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
        """The headers that concern both ends rather than one connection, and those named in `keep`."""
        dropped = (HOP_BY_HOP_HEADERS | set(self.header_values("connection"))) - keep - FRAMING_HEADERS
        if self.header_values("transfer-encoding"):
            dropped |= {"content-length"}  # of no meaning beside it, but some would believe it
        return [(name, value) for name, value in self.headers if name.lower() not in dropped]


async def read_head(reader: asyncio.StreamReader, strict: bool = True) -> HTTPHead | None:
    """The next head; None where the other side has ended. Raises BadMessage.

    `strict` is for requests. Of answers, which come in every shape, lines that are no header are left out.
    """
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise MalformedHTTP("ended within a head") from None
        return None
    except asyncio.LimitOverrunError:
        raise MalformedHTTP(f"a head of more than {MAX_HEAD_BYTES} bytes") from None
    first, *lines = raw.decode("latin-1")[:-4].split("\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and _TOKEN.fullmatch(name) and not any(character in value for character in "\r\n\0"):
            headers.append((name, value.strip(" \t")))
        elif strict:
            raise MalformedHTTP("a line that is no header")
    return HTTPHead(first, tuple(headers), len(raw))


def encode_head(first: str, headers: list[tuple[str, str]]) -> bytes:
    """A head as bytes."""
    lines = [first, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def request_body_length(head: HTTPHead) -> int:
    """Bytes of a request's body, or CHUNKED. Raises BadMessage."""
    coding, length = head.header_values("transfer-encoding"), _content_length(head)
    if coding and (coding != ["chunked"] or length is not None):
        raise MalformedHTTP("a body of unclear length")
    return CHUNKED if coding else length or 0


def response_body_length(head: HTTPHead, method: str, code: int) -> int:
    """Bytes of an answer's body, or CHUNKED, or UNTIL_END. Raises BadMessage."""
    if method == "HEAD" or code < 200 or code in (204, 304):
        return 0
    if coding := head.header_values("transfer-encoding"):
        return CHUNKED if coding[-1] == "chunked" else UNTIL_CLOSE
    length = _content_length(head)
    return UNTIL_CLOSE if length is None else length


async def iter_body(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    """A body in pieces, chunk lines and trailers included. Raises BadMessage."""
    if length == UNTIL_CLOSE:
        while piece := await reader.read(BUFFER_BYTES):
            yield piece
    elif length != CHUNKED:
        async for piece in _exactly(reader, length):
            yield piece
    else:
        size = 1
        while size:
            line = await _line(reader)
            found = _CHUNK_SIZE.fullmatch(line)
            if not found:
                raise MalformedHTTP("not a chunk size")
            yield line
            size = int(found[1], 16)
            if size:
                async for piece in _exactly(reader, size):
                    yield piece
                if (end := await _line(reader)) != b"\r\n":
                    raise MalformedHTTP("a chunk longer than its size")
                yield end
        while (line := await _line(reader)) != b"\r\n":
            yield line
        yield line


async def _exactly(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        piece = await reader.read(min(length, BUFFER_BYTES))
        if not piece:
            raise MalformedHTTP("ended within a body")
        length -= len(piece)
        yield piece


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n")
    except asyncio.IncompleteReadError:
        raise MalformedHTTP("ended within a body") from None
    except asyncio.LimitOverrunError:
        raise MalformedHTTP("a chunk line without end") from None


def _content_length(head: HTTPHead) -> int | None:
    values = set(head.header_values("content-length"))
    if not values:
        return None
    value = values.pop()
    if values or not (value.isascii() and value.isdigit()) or len(value) > 15:
        raise MalformedHTTP("a body of unclear length")
    return int(value)
