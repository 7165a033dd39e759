"""HTTP/1.1 framing for a proxy: heads, and the length of bodies."""

from __future__ import annotations

import asyncio
import codecs
import html
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

MAX_HEAD_BYTES = 65536  # limit of the stream reader, for a head, a chunk line or a trailer
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
    """Bytes that are not HTTP/1.1, or that two parsers could read differently."""


@dataclass(frozen=True)
class HTTPHead:
    """Start line and headers of a message."""

    start_line: str
    headers: tuple[tuple[str, str], ...]
    size: int  # bytes

    def header_values(self, name: str) -> list[str]:
        """The comma-separated values of all headers with that name, in lower case."""
        values = [value for key, value in self.headers if key.lower() == name]
        return [item.strip().lower() for value in values for item in value.split(",") if item.strip()]

    def parse_request_line(self) -> tuple[str, str]:
        """Method and target. Raises MalformedHTTP."""
        match = _REQUEST.fullmatch(self.start_line)
        if not match:
            raise MalformedHTTP("not a request line")
        return match[1], match[2]

    def parse_status_line(self) -> tuple[int, str, bool]:
        """Status code, reason, and whether the server speaks HTTP/1.1. Raises MalformedHTTP."""
        match = _STATUS.fullmatch(self.start_line)
        if not match:
            raise MalformedHTTP("not a status line")
        return int(match[2]), match[3] or "", match[1] == "1"

    def end_to_end_headers(self, keep: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
        """The headers without hop-by-hop ones, except the hop-by-hop headers in `keep`."""
        dropped = (HOP_BY_HOP_HEADERS | set(self.header_values("connection"))) - keep - FRAMING_HEADERS
        if self.header_values("transfer-encoding"):
            dropped |= {"content-length"}  # ignored next to Transfer-Encoding, but some servers use it
        return [(name, value) for name, value in self.headers if name.lower() not in dropped]


async def read_head(reader: asyncio.StreamReader, strict: bool = True) -> HTTPHead | None:
    """Read the next head; None if the peer has closed. Raises MalformedHTTP; bad lines are skipped unless `strict`."""
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
        elif strict:  # a request; responses are often malformed
            raise MalformedHTTP("a line that is no header")
    return HTTPHead(first, tuple(headers), len(raw))


def encode_head(start_line: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [start_line, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1", "windows-1252-or-utf-8")


def _encode_beyond_latin1(error: UnicodeError) -> tuple[bytes, int]:
    """DevTools decode the bytes of a header as Windows-1252; text beyond it is sent as UTF-8."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    try:
        return text.encode("windows-1252"), error.end
    except UnicodeEncodeError:
        return text.encode(errors="replace"), error.end


codecs.register_error("windows-1252-or-utf-8", _encode_beyond_latin1)


def encode_error_page(code: int, reason: str, sentence: str, headers: list[tuple[str, str]] | None = None) -> bytes:
    """A response with a short page that says why there is no other. `headers` are added."""
    text = f"<!DOCTYPE html><title>Not reachable</title><p>Not reachable: {html.escape(sentence)}.</p>".encode()
    fields = [
        ("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(text))), ("Cache-Control", "no-store"),
    ]  # fmt: skip
    return encode_head(f"HTTP/1.1 {code} {reason}", [*fields, *(headers or [])]) + text


def request_body_length(head: HTTPHead) -> int:
    """Length of a request body in bytes, or CHUNKED. Raises MalformedHTTP."""
    coding, length = head.header_values("transfer-encoding"), _content_length(head)
    if coding and (coding != ["chunked"] or length is not None):
        raise MalformedHTTP("a body of unclear length")
    return CHUNKED if coding else length or 0


def response_body_length(head: HTTPHead, method: str, code: int) -> int:
    """Length of a response body in bytes, or CHUNKED or UNTIL_CLOSE. Raises MalformedHTTP."""
    if method == "HEAD" or code < 200 or code in (204, 304):
        return 0
    if coding := head.header_values("transfer-encoding"):
        return CHUNKED if coding[-1] == "chunked" else UNTIL_CLOSE
    length = _content_length(head)
    return UNTIL_CLOSE if length is None else length


async def iter_body(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    """Yield a body in pieces, chunk lines and trailers included. Raises MalformedHTTP."""
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
            match = _CHUNK_SIZE.fullmatch(line)
            if not match:
                raise MalformedHTTP("not a chunk size")
            yield line
            size = int(match[1], 16)
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
