"""Servers, raw HTTP requests and an episode's network access, for tests of the egress proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from megatron_webrl.browser.egress.egress_policy import NetworkAccess, declared_endpoints
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.config.browser import BrowserConfig

SECONDS = 15.0  # limit of a test's waits
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A TCP server on 127.0.0.1 with a handler. Counts connections."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.connections = 0
        self.port = 0

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def head_of(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")


def answering(answer: bytes, heads: list[str] | None = None) -> Handler:
    """A handler that sends the same response to every request without a body."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await head_of(reader)
            if heads is not None:
                heads.append(head)
            writer.write(answer)

    return handle


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)


@asynccontextmanager
async def open_network(
    origins: dict[str, str] | None = None, names: dict[str, list[list[str]]] | None = None, **settings: object
) -> AsyncIterator[NetworkAccess]:
    """The network access of an episode; maps `origins` to addresses and resolves `names`, one list per look-up."""
    answers = {name: iter(lists) for name, lists in (names or {}).items()}

    async def resolve(host: str) -> list[str]:
        name = host.removesuffix(".")
        if name not in answers:
            raise OSError("no such name")
        return next(answers[name])

    proxy = EgressProxy(BrowserConfig(**settings), resolve)  # type: ignore[arg-type]
    declared = declared_endpoints(origins or {}, {url.split("//")[1]: to for url, to in (origins or {}).items()})
    network = await proxy.open_port(declared)
    try:
        async with asyncio.timeout(SECONDS):
            yield network
    finally:
        await network.close()
        proxy.close()


@asynccontextmanager
async def serving(handler: Handler, **settings: object) -> AsyncIterator[tuple[Server, NetworkAccess]]:
    """A server, which is http://a.test and https://a.test, and the network access of an episode that reaches it."""
    async with Server(handler) as server:
        address = f"127.0.0.1:{server.port}"
        async with open_network({"http://a.test": address, "https://a.test": address}, **settings) as network:  # type: ignore[arg-type]
            yield server, network


async def open_tunnel(network: NetworkAccess, more: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A tunnel to a.test:443, on which `more` is sent with the request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
    writer.write(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n" + more)
    assert (await head_of(reader)).startswith("HTTP/1.1 200 ")
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    try:
        while piece := await reader.read(65536):
            pieces.append(piece)
    except ConnectionError:
        pass
    return b"".join(pieces)


async def ask(network: NetworkAccess, request: str | bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
    writer.write(request if isinstance(request, bytes) else request.encode())
    try:
        return await rest_of(reader)
    finally:
        writer.close()


def get(url: str, *headers: str) -> str:
    return "\r\n".join([f"GET {url} HTTP/1.1", "Host: ignored.example", "Connection: close", *headers, "", ""])
