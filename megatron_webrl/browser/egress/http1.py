"""HTTP/1.1 on asyncio streams: h11 parses every message and writes another one, so that no two parsers can differ."""

from __future__ import annotations

import asyncio
import codecs
import html
from collections.abc import AsyncIterator, Callable, Iterable

import h11

MAX_HEAD_BYTES = 65536  # for a head or the line of a chunk
BUFFER_BYTES = 65536

HOP_BY_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te", "upgrade"}
)
FRAMING_HEADERS = frozenset({"content-length", "transfer-encoding"})
UPGRADE = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]

Headers = list[tuple[bytes, bytes]]


class HTTPStream:
    """One side's messages on a connection: h11's events, read from and written to asyncio streams."""

    def __init__(
        self, role: type[h11.CLIENT] | type[h11.SERVER], reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        count_bytes: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`role`: this process's. `count_bytes` is called with the number of bytes of each read."""
        self.connection = h11.Connection(role, MAX_HEAD_BYTES)
        self.reader, self.writer = reader, writer
        self._count_bytes = count_bytes
        self._method = b""  # of the current request

    @property
    def can_respond(self) -> bool:
        """Whether a server has not begun a response."""
        return self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    async def receive(self) -> h11.Event:
        """The next event; ConnectionClosed if the peer closes before a message. Raises h11.RemoteProtocolError."""
        while (event := self.connection.next_event()) is h11.NEED_DATA:
            data = await self.reader.read(BUFFER_BYTES)
            self._count_bytes(len(data))
            if not data and not self.connection.trailing_data[0] and self.connection.their_state is h11.SEND_RESPONSE:
                return h11.ConnectionClosed()
            self.connection.receive_data(data)
        if isinstance(event, h11.Request):
            self._method = event.method
            if {name.decode() for name, _ in event.headers} >= FRAMING_HEADERS:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        assert not isinstance(event, type)
        return event

    async def receive_body(self) -> AsyncIterator[bytes]:
        """Yield the body of the message in pieces; trailers are dropped. Raises h11.RemoteProtocolError."""
        while isinstance(event := await self.receive(), h11.Data):
            yield bytes(event.data)

    async def send(self, event: h11.Event) -> None:
        """Send an event. Raises h11.LocalProtocolError."""
        self.writer.write(self.connection.send(event) or b"")
        await self.writer.drain()

    async def respond(self, status: int, reason: str, headers: Headers, body: bytes) -> None:
        """Send a whole response; its body is left out where a response has none."""
        self.writer.write(self.connection.send(h11.Response(status_code=status, reason=reason, headers=headers)) or b"")
        bodiless = status in (204, 304) or self._method == b"HEAD"
        await self.send(h11.Data(data=b"" if bodiless else body))
        await self.send(h11.EndOfMessage())

    def next_message(self) -> bool:
        """Prepare for another message on the connection; returns whether one is possible."""
        if (self.connection.our_state, self.connection.their_state) != (h11.DONE, h11.DONE):
            return False
        self.connection.start_next_cycle()
        return True

    async def is_silent(self) -> bool:
        """Whether the peer has neither closed the connection nor sent what nobody asked for."""
        if self.connection.trailing_data[0]:
            return False
        try:
            async with asyncio.timeout(0):  # `read` returns at once if there is anything, else it waits
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False


def header_values(headers: Iterable[tuple[bytes, bytes]], name: str) -> list[str]:
    """The comma-separated values of all headers with that name, in lower case."""
    values = [value.decode("latin-1").lower() for key, value in headers if key.lower() == name.encode()]
    return [item.strip(" \t") for value in values for item in value.split(",")]


def end_to_end_headers(head: h11.Request | h11.InformationalResponse | h11.Response) -> Headers:
    """The headers without hop-by-hop ones, those that Connection names among them."""
    dropped = (HOP_BY_HOP_HEADERS | set(header_values(head.headers, "connection"))) - FRAMING_HEADERS
    return [(name, value) for name, value in head.headers.raw_items() if name.lower().decode() not in dropped]


def encode_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1", "windows-1252-or-utf-8")) for name, value in headers]


def _encode_beyond_latin1(error: UnicodeError) -> tuple[bytes, int]:
    """DevTools decode the bytes of a header as Windows-1252; text beyond it is sent as UTF-8."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    try:
        return text.encode("windows-1252"), error.end
    except UnicodeEncodeError:
        return text.encode(errors="replace"), error.end


codecs.register_error("windows-1252-or-utf-8", _encode_beyond_latin1)


def error_page(sentence: str) -> tuple[Headers, bytes]:
    """Headers and body of a short page that says why there is no other."""
    text = f"<!DOCTYPE html><title>Not reachable</title><p>Not reachable: {html.escape(sentence)}.</p>".encode()
    fields = {
        "Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(text)), "Cache-Control": "no-store",
        "Content-Security-Policy": "default-src 'none'",
    }  # fmt: skip
    return encode_headers(fields.items()), text
