"""Limits of connections: in number, for a request to arrive, idle, and for a response to be read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from megatron_webrl.control.http.http_service import (
    MAX_HEAD_BYTES,
    ConnectionLimits,
    ListenAddress,
    Listener,
    run_http_server,
)
from tests.waiting import eventually

GET = b"GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = 64 * 2**20  # bytes, more than the buffers of both sockets
SHORT = ConnectionLimits(request_seconds=0.3, idle_seconds=0.3, unread_seconds=0.3)
LIMIT = 20.0


class Service:
    """A service on loopback."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.operations = 0  # requests whose response is under way
        self.may_answer = asyncio.Event()

    async def quick(self, request: Request) -> Response:
        return Response(await request.body() or b"ok")

    async def slow(self, request: Request) -> PlainTextResponse:
        self.operations += 1
        await self.may_answer.wait()
        return PlainTextResponse("late")

    async def large(self, request: Request) -> PlainTextResponse:
        self.operations += 1
        return PlainTextResponse("x" * LARGE)

    async def connect(self, host: str = "127.0.0.1") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        return Client(reader, writer)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def response(self, request: bytes = GET) -> bytes:
        """Send a request and read the body of its response."""
        self.writer.write(request)
        async with asyncio.timeout(LIMIT):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
            )
            return await self.reader.readexactly(length)

    async def is_refused(self) -> bool:
        """Whether the service closes the connection instead of answering."""
        try:
            await self.response()
        except (ConnectionError, asyncio.IncompleteReadError):
            return True
        return False

    async def seconds_until_closed(self) -> float:
        started = time.monotonic()
        async with asyncio.timeout(LIMIT):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        return time.monotonic() - started

    async def write_until_it_fails(self) -> None:
        """The kernel reports a reset connection to a write."""
        async with asyncio.timeout(LIMIT):
            while True:
                self.writer.write(b"x")
                await self.writer.drain()
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(limits: ConnectionLimits) -> AsyncIterator[Service]:
    listener = Listener(ListenAddress("127.0.0.1", 0, limits=limits))
    service = Service(listener.socket.getsockname()[1])
    routes = [Route(f"/{name}", getattr(service, name), methods=["GET", "POST"]) for name in ("quick", "slow", "large")]
    async with run_http_server(Starlette(routes=routes), listener), AsyncExitStack() as stack:
        stack.callback(service.may_answer.set)
        yield service


async def test_a_request_must_arrive_in_time_and_idle_connections_are_closed() -> None:
    async with running(SHORT) as service:

        async def seconds(sent: bytes, after: int) -> float:
            client = await service.connect()
            for _ in range(after):
                assert await client.response() == b"ok"
            client.writer.write(sent)
            return await client.seconds_until_closed()

        busy = await service.connect()
        answer = asyncio.ensure_future(busy.response(GET.replace(b"quick", b"slow")))
        for _ in range(2):  # the time limit of a request passes twice, which the busy one outlives
            found = await asyncio.gather(
                seconds(b"", 0),
                seconds(b"", 1),
                seconds(b"GET / HT", 0),
                seconds(b"GET /qu", 1),
                seconds(b"GET /quick HTTP/1.1\r\nHost: localhost\r\n", 0),
                seconds(b"POST /quick HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhalf", 0),
            )
            assert found == [pytest.approx(0.3, abs=0.25)] * len(found)
        service.may_answer.set()
        assert await answer == b"late"


async def test_a_head_without_end_closes_the_connection() -> None:
    async with running(ConnectionLimits()) as service:
        for sent in (b"GET /quick HTTP/1.1\r\nX: ", b"GET /", b"GET /quick HTTP/1.1\r\n" + b"X: y\r\n" * 20_000):
            client = await service.connect()
            client.writer.write(sent + b"a" * 2 * MAX_HEAD_BYTES)
            assert await client.seconds_until_closed() < 5.0, sent[:30]


async def test_requests_in_advance_add_nothing_to_a_body() -> None:
    async with running(ConnectionLimits()) as service:
        client = await service.connect()
        post = b"POST /quick HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"
        assert await client.response(post + b"mine" + post + b"more") == b"mine"
        assert await client.response(b"") == b"more"


async def test_bytes_that_trickle_in_prolong_nothing() -> None:
    async with running(SHORT) as service:
        client = await service.connect()

        async def trickle() -> None:
            for byte in b"GET /quick HTTP/1.1\r\nX: " + b"a" * 10_000:
                client.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        sending = asyncio.ensure_future(trickle())
        assert await client.seconds_until_closed() < 1.0
        sending.cancel()


async def test_a_client_that_reads_no_response_is_disconnected() -> None:
    async with running(SHORT) as service:
        client = await service.connect()
        client.writer.transport.pause_reading()
        client.writer.write(GET.replace(b"quick", b"large"))
        await eventually(lambda: service.operations, LIMIT)
        with pytest.raises(ConnectionError):
            await client.write_until_it_fails()


async def test_connections_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    async with running(ConnectionLimits(max_connections=2)) as service:
        taken = [await service.connect() for _ in range(2)]
        for client in taken:
            assert await client.response() == b"ok"
        for _ in range(3):
            assert await (await service.connect()).is_refused()
        assert [await client.response() for client in taken] == [b"ok", b"ok"]
        taken.pop().writer.close()
        async with asyncio.timeout(LIMIT):
            while await (await service.connect()).is_refused():
                await asyncio.sleep(0.02)
    assert caplog.messages.count("refused a connection of 127.0.0.1: 2 are open (--max-connections)") == 1
