"""Framing of the egress proxy: what it sends is canonical, and means what h11 and Chromium read in the original."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import h11
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.browser.egress.proxy_client import Server, ask, get, head_of, open_network, rest_of

FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?((?:[^\x00\s]+(?:[ \t]+[^\x00\s]+)*)?)")
CHUNK = re.compile(rb"([0-9a-f]{1,8})\r\n")


@dataclass(frozen=True)
class Message:
    start_line: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case; without those of framing and connection
    body: bytes


def read_canonical(data: bytes) -> Message:
    """Read a message strictly: one kind of framing, CRLF only, no extension, trailer or byte left over."""
    head, end, rest = data.partition(b"\r\n\r\n")
    assert end, data[:300]
    first, *lines = head.split(b"\r\n")
    fields = []
    for line in lines:
        match = FIELD.fullmatch(line)
        assert match, line
        fields.append((match[1].lower(), match[2]))
    names = [name for name, _ in fields]
    framing = [(name, value) for name, value in fields if name in (b"content-length", b"transfer-encoding")]
    assert len(framing) <= 1, framing
    body = rest
    if framing and framing[0][0] == b"transfer-encoding":
        assert framing[0][1] == b"chunked"
        body = b"".join(chunks(rest))
    elif framing:
        assert int(framing[0][1]) == len(rest)
    assert names.count(b"host") <= 1
    hidden = {b"content-length", b"transfer-encoding", b"connection", b"host"}
    return Message(first, tuple(field for field in fields if field[0] not in hidden), body)


def chunks(data: bytes) -> Iterator[bytes]:
    while True:
        match = CHUNK.match(data)
        assert match, data[:40]
        size = int(match[1], 16)
        piece, data = data[match.end() :][:size], data[match.end() + size :]
        assert data.startswith(b"\r\n")
        data = data[2:]
        if not size:
            assert not data
            return
        yield piece


def read_with_h11(data: bytes, method: bytes = b"GET") -> Message | None:
    """What h11 reads as the response to a request; None if it refuses it."""
    connection = h11.Connection(h11.CLIENT, 65536)
    connection.send(h11.Request(method=method, target="/", headers=[("Host", "a.test")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    first, fields, body = b"", [], b""
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                first = b"HTTP/1.1 %d " % event.status_code + event.reason
                fields = [(bytes(name), bytes(value)) for name, value in event.headers]
            elif isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None
    named = {
        item.strip(b" \t") for name, value in fields if name == b"connection" for item in value.lower().split(b",")
    }
    hidden = named | {b"content-length", b"transfer-encoding", b"connection", b"host", b"keep-alive", b"te", b"upgrade"}
    hidden |= {b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"}
    return Message(first, tuple(field for field in fields if field[0] not in hidden), body)


def sending(response: bytes, pieces: int = 1) -> Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        size = max(1, -(-len(response) // pieces))
        for start in range(0, len(response), size):
            writer.write(response[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)

    return Server(handle)


async def through_proxy(response: bytes, pieces: int = 1) -> tuple[bytes, list[str]]:
    async with sending(response, pieces) as server, open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as net:
        received = await ask(net, get("http://a.test/"))
        while net.connections:
            await asyncio.sleep(0)
        return received, net.take_errors("http://a.test/")


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
REWRITTEN = {
    "extensions of chunks": CHUNKED + b"5;a=b\r\nhello\r\n0;c\r\n\r\n",
    "trailers": CHUNKED + b"5\r\nhello\r\n0\r\nSet-Cookie: a=b\r\nX: y\r\n\r\n",
    "both lengths": OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "the same length twice": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "lines without carriage return": b"HTTP/1.1 200 OK\nContent-Length: 5\nX: y\n\nhello",
    "a folded line": OK + b"X: a\r\n\tb\r\nContent-Length: 5\r\n\r\nhello",
    "leading zeros": CHUNKED + b"00005\r\nhello\r\n000\r\n\r\n",
    "until the end": OK + b"\r\nhello",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nhello",
    "no reason": b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello",
    "a header of the connection": OK + b"Connection: X\r\nX: y\r\nContent-Length: 5\r\n\r\nhello",
    "bytes after the end": OK + b"Content-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\n\r\nsmuggled",
}
NO_BODY = {
    "a length of no content": b"HTTP/1.1 204 None\r\nContent-Length: 5\r\n\r\nhello",
    "a length of early hints": b"HTTP/1.1 103 Early\r\nContent-Length: 5\r\n\r\nHTTP/1.1 204 None\r\n\r\n",
}
REFUSED = {
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a signed length": OK + b"Content-Length: +5\r\n\r\nhello",
    "another coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "a coding after a vertical tab": OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "a coding after a no-break space": OK + b"Transfer-Encoding: \xa0chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "space before the colon": OK + b"Content-Length : 5\r\n\r\nhello",
    "a carriage return in a value": OK + b"X: a\rSet-Cookie: b=c\r\nContent-Length: 5\r\n\r\nhello",
    "a zero byte": OK + b"X: a\x00b\r\nContent-Length: 5\r\n\r\nhello",
    "a line that is no header": OK + b"nothing\r\nContent-Length: 5\r\n\r\nhello",
    "no status line": b"hello",
    "another protocol": b"ICY 200 OK\r\n\r\nhello",
    "a switch that nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nhello",
}


BROKEN_CHUNKS = (
    b"z\r\nhello", b"5\r\nhello!\r\n0\r\n\r\n", b"5 5\r\nhello\r\n0\r\n\r\n", b"-5\r\nhello\r\n0\r\n\r\n", b"5\r\nh",
)  # fmt: skip


async def test_a_response_is_rewritten_canonically_or_refused_with_a_reason() -> None:
    for name, response in REWRITTEN.items():
        received, errors = await through_proxy(response)
        assert read_canonical(received) == read_with_h11(response), name
        assert read_canonical(received).body == b"hello"
        assert b"smuggled" not in received
        assert not errors
    for name, response in NO_BODY.items():  # says nothing of its length
        received, errors = await through_proxy(response)
        assert b"content-length" not in received.lower(), name
        assert received.endswith(b"HTTP/1.1 204 None\r\nConnection: close\r\n\r\n")
        assert not errors
    for name, response in REFUSED.items():
        received, [error] = await through_proxy(response)
        assert received == b"", name
        assert error.startswith("a.test:80 sent no valid HTTP: ")
    for body in BROKEN_CHUNKS:  # never looks complete
        received, _ = await through_proxy(CHUNKED + body)
        assert read_with_h11(received) is None, body


async def test_what_a_server_sends_after_its_response_does_not_answer_the_next_request() -> None:
    ended = asyncio.Queue[None]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await head_of(reader)).split(" ")[1][1:]
        body = f"{OK.decode()}Content-Length: {len(target)}\r\n\r\n{target}"
        writer.write(body.encode() + OK + b"Content-Length: 8\r\n\r\nsmuggled")
        with suppress(ConnectionError):
            await reader.read()
        ended.put_nowait(None)

    async with Server(handle) as server, open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as network:
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        for target in ("first", "second"):
            writer.write(f"GET http://a.test/{target} HTTP/1.1\r\nHost: a.test\r\n\r\n".encode())
            await head_of(reader)
            assert await reader.readexactly(len(target)) == target.encode()
            await ended.get()  # the proxy leaves no connection open
        writer.close()
        assert server.connections == 2


FRAGMENTS = st.sampled_from([
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 204 x\r\n", b"HTTP/1.1 100 x\r\n\r\n", b"\r\n", b"\n",
    b"\r", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Content-Length:\t6 \r\n", b"X: y\r\n", b" folded\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"Connection: close\r\n", b"X:\r\n",
    b"Connection: X\r\n", b"hello", b"5\r\nhello\r\n", b"0\r\n\r\n", b"3;a=b\r\nabc\r\n",
    b"\x0b", b"\x85", b"\xa0", b"\x00", b":", b";", b" ", b"\t",
])  # fmt: skip
GRAMMAR = st.builds(
    lambda start, headers, body: start + b"".join(headers) + b"\r\n" + b"".join(body),
    FRAGMENTS, st.lists(FRAGMENTS, max_size=5), st.lists(FRAGMENTS, max_size=5),
)  # fmt: skip
MUTATED = st.builds(
    lambda text, place, fragment: text[: place % len(text)] + fragment + text[place % len(text) :],
    st.sampled_from([*REWRITTEN.values(), *REFUSED.values()]), st.integers(0, 200), FRAGMENTS,
)  # fmt: skip
RESPONSES = st.one_of(GRAMMAR, MUTATED, st.binary(max_size=200))


@settings(max_examples=100)
@given(RESPONSES, st.integers(1, 9))
def test_the_browser_receives_what_h11_reads_or_no_complete_response(response: bytes, pieces: int) -> None:
    meant = read_with_h11(response)
    received, _ = asyncio.run(through_proxy(response, pieces))
    final = re.sub(rb"\A(?:HTTP/1\.1 1\d\d [^\r]*\r\n(?:[^\r]+\r\n)*\r\n)+", b"", received)
    if meant is None:
        assert read_with_h11(received) is None
    else:
        assert read_canonical(final) == meant


REQUESTS = st.builds(
    lambda start, headers, body: start + b"Host: a.test\r\n" + b"".join(headers) + b"\r\n" + b"".join(body),
    st.sampled_from([method + b" http://a.test/ HTTP/1.1\r\n" for method in (b"GET", b"POST", b"HEAD")]),
    st.lists(FRAGMENTS, max_size=4), st.lists(FRAGMENTS, max_size=4),
)  # fmt: skip


def first_request(data: bytes, ended: bool = False) -> tuple[bytes, bytes] | None:
    """Method and body of the first request as h11 reads it; None if it is not complete, or not valid."""
    connection, method, body = h11.Connection(h11.SERVER, 65536), b"", b""
    connection.receive_data(data)
    if ended:
        connection.receive_data(b"")
    try:
        while not isinstance(event := connection.next_event(), type | h11.EndOfMessage | h11.ConnectionClosed):
            method = event.method if isinstance(event, h11.Request) else method
            body += event.data if isinstance(event, h11.Data) else b""
    except h11.RemoteProtocolError:
        return None
    return (method, body) if isinstance(event, h11.EndOfMessage) else None


@settings(max_examples=100)
@given(REQUESTS)
@example(b"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000)
def test_a_server_receives_what_h11_reads_in_canonical_requests_only(request: bytes) -> None:
    received: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(b"")
        while piece := await reader.read(65536):
            received[-1] += piece
            if first_request(received[-1]) is not None:
                read_canonical(received[-1])  # raises AssertionError: the test sees it as a request without a response
                writer.write(b"HTTP/1.1 299 Served\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    async def run() -> bytes:
        async with Server(handle) as server, open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as network:
            reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
            writer.write(request)
            writer.write_eof()
            answer = await rest_of(reader)
            writer.close()
            return answer

    answer, meant = asyncio.run(run()), first_request(request, ended=True)
    answers = answer.count(b"HTTP/1.1 299 Served")
    assert len(received) - 1 <= answers <= len(received)  # only the last can be cut off, where its body is malformed
    if meant is None:
        assert not answers
    elif answers:
        assert first_request(received[0]) == meant
    else:
        assert b" 400 " in answer
