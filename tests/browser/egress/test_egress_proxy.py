"""The gateway on real sockets: what it passes on, what it refuses, and that nothing forbidden is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest

from megatron_webrl.browser.egress import egress_policy as policy_module
from megatron_webrl.browser.egress import egress_proxy as gateway_module
from megatron_webrl.browser.egress import proxy_connection
from megatron_webrl.browser.egress.egress_policy import declared_endpoints
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.config.browser import BrowserConfig

SECONDS = 15.0  # limit of a test's waits
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A server of the test's own on 127.0.0.1. Counts connections."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.connections = 0
        self.heads: list[str] = []
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
    """A handler that gives the same answer to every request without a body."""

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
async def admitted(
    origins: dict[str, str] | None = None, names: dict[str, list[list[str]]] | None = None, **settings: object
) -> AsyncIterator[NetworkAccess]:
    """An episode that may reach `origins` at the addresses given; `names` answers look-ups, one list after another."""
    answers = {name: iter(lists) for name, lists in (names or {}).items()}

    async def resolve(host: str) -> list[str]:
        if host not in answers:
            raise OSError("no such name")
        return next(answers[host])

    gateway = EgressProxy(BrowserConfig(**settings), resolve)  # type: ignore[arg-type]
    declared = declared_endpoints(origins or {}, {url.split("//")[1]: to for url, to in (origins or {}).items()})
    access = await gateway.open_port(declared)
    try:
        async with asyncio.timeout(SECONDS):
            yield access
    finally:
        await access.close()
        gateway.close()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Everything that comes until the connection is closed or cut off."""
    pieces = []
    try:
        while piece := await reader.read(65536):
            pieces.append(piece)
    except ConnectionError:
        pass
    return b"".join(pieces)


async def ask(access: NetworkAccess, request: str | bytes) -> bytes:
    """Everything that comes back on a connection of its own until it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
    writer.write(request if isinstance(request, bytes) else request.encode())
    try:
        return await rest_of(reader)
    finally:
        writer.close()


def get(url: str, *headers: str) -> str:
    return "\r\n".join([f"GET {url} HTTP/1.1", "Host: ignored.example", "Connection: close", *headers, "", ""])


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers on this machine stand in for public ones: only 127.0.0.2 and above count as loopback here."""
    real = policy_module.special_address_kind
    monkeypatch.setattr(
        policy_module,
        "special_address_kind",
        lambda address: None if address == ip_address("127.0.0.1") else real(address),
    )


# Passing on


async def test_a_declared_origin_is_reached_where_its_source_says() -> None:
    heads: list[str] = []
    url = "http://user:pw@SHOP.localhost./a?b=1"
    async with (
        Server(answering(OK, heads)) as server,
        admitted({"http://shop.localhost": f"127.0.0.1:{server.port}"}) as access,
    ):
        answer = await ask(access, get(url, "Proxy-Authorization: x", "Cookie: c"))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"hello")
    lines = heads[0].split("\r\n")
    assert lines[:2] == ["GET /a?b=1 HTTP/1.1", "Host: shop.localhost"]
    assert "Cookie: c" in lines
    assert "proxy-authorization" not in heads[0].lower()
    assert access.requests == 1


async def test_requests_on_one_connection_use_one_connection_to_the_server() -> None:
    async with Server(answering(OK)) as server, admitted({"http://a.test": f"127.0.0.1:{server.port}"}) as access:
        reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
        for _ in range(3):
            writer.write(b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
            await head_of(reader)
            assert await reader.readexactly(5) == b"hello"
        writer.close()
        assert (server.connections, access.requests) == (1, 3)


async def test_requests_for_two_origins_on_one_connection_reach_both() -> None:
    other = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother"
    async with Server(answering(OK)) as one, Server(answering(other)) as two:
        origins = {"http://a.test": f"127.0.0.1:{one.port}", "http://b.test": f"127.0.0.1:{two.port}"}
        async with admitted(origins) as access:
            reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
            for host, body in (("a", b"hello"), ("b", b"other"), ("a", b"hello")):
                writer.write(f"GET http://{host}.test/ HTTP/1.1\r\n\r\n".encode())
                await head_of(reader)
                assert await reader.readexactly(5) == body
            writer.close()


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        ("Transfer-Encoding: chunked", b"5;x=y\r\nhello\r\nA\r\n0123456789\r\n0\r\nX: trailer\r\n\r\n"),
        ("Content-Length: 3", b"abc"),
        ("X: until the end", b"abc" * 100_000),
    ],
)
async def test_bodies_of_every_framing_come_back_byte_for_byte(framing: str, body: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode() + body)
        await writer.drain()

    async with Server(handle) as server, admitted({"http://a.test": f"127.0.0.1:{server.port}"}) as access:
        answer = await ask(access, get("http://a.test/"))
        assert answer.partition(b"\r\n\r\n")[2] == body
        assert framing.encode() in answer


@pytest.mark.parametrize(
    ("framing", "body"),
    [("Content-Length: 200000", b"x" * 200_000), ("Transfer-Encoding: chunked", b"4\r\nabcd\r\n0\r\n\r\n")],
)
async def test_a_request_with_a_body_reaches_the_server_whole(framing: str, body: bytes) -> None:
    received = asyncio.get_running_loop().create_future()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        received.set_result(await reader.readexactly(len(body)))
        writer.write(OK)

    async with Server(handle) as server, admitted({"http://a.test": f"127.0.0.1:{server.port}"}) as access:
        answer = await ask(
            access, f"POST http://a.test/ HTTP/1.1\r\n{framing}\r\nConnection: close\r\n\r\n".encode() + body
        )
        assert answer.endswith(b"hello")
        assert await received == body


async def test_answers_to_head_and_not_modified_have_no_body_and_early_hints_are_passed_on() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n"
    async with Server(answering(early)) as server, admitted({"http://a.test": f"127.0.0.1:{server.port}"}) as access:
        answer = await ask(access, get("http://a.test/"))
        assert [line for line in answer.decode().split("\r\n") if line.startswith("HTTP")] == [
            "HTTP/1.1 103 Early Hints", "HTTP/1.1 304 Not Modified",
        ]  # fmt: skip


async def test_a_tunnel_carries_bytes_both_ways_and_counts_them() -> None:
    async with Server(echo) as server, admitted({"https://a.test": f"127.0.0.1:{server.port}"}) as access:
        reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
        writer.write(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\nearly")
        assert (await head_of(reader)).startswith("HTTP/1.1 200 ")
        assert await reader.readexactly(5) == b"early"
        writer.write(b"y" * 300_000)
        assert await reader.readexactly(300_000) == b"y" * 300_000
        writer.close()
        assert access.bytes >= 600_010


@pytest.mark.parametrize("way", ["upgrade", "tunnel"])
async def test_a_websocket_is_reached_by_upgrade_and_through_a_tunnel(way: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await head_of(reader)).lower()
        assert "\r\nupgrade: websocket\r\n" in head
        assert "\r\nconnection: upgrade\r\n" in head
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        await echo(reader, writer)

    async with Server(handle) as server, admitted({"http://a.test": f"127.0.0.1:{server.port}"}) as access:
        reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
        target = "http://a.test/" if way == "upgrade" else "/"
        if way == "tunnel":
            writer.write(b"CONNECT a.test:80 HTTP/1.1\r\n\r\n")
            await head_of(reader)
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode()
        )
        assert (await head_of(reader)).startswith("HTTP/1.1 101 ")
        writer.write(b"frame")
        assert await reader.readexactly(5) == b"frame"
        writer.close()


# Refusing


@pytest.mark.parametrize(
    ("request_line", "reason"),
    [
        ("GET http://127.0.0.1:{port}/ HTTP/1.1", "loopback"),
        ("GET http://2130706433:{port}/ HTTP/1.1", "loopback"),
        ("GET http://[::ffff:127.0.0.1]:{port}/ HTTP/1.1", "loopback"),
        ("GET http://localhost:{port}/ HTTP/1.1", "port"),
        ("GET http://localhost/ HTTP/1.1", "loopback"),
        ("GET http://a.example@127.0.0.1:{port}/ HTTP/1.1", "loopback"),
        ("CONNECT 127.0.0.1:{port} HTTP/1.1", "loopback"),
        ("CONNECT 0x7f.1:{port} HTTP/1.1", "loopback"),
        ("GET http://169.254.169.254/latest/meta-data/ HTTP/1.1", "metadata"),
        ("CONNECT metadata.google.internal:80 HTTP/1.1", "metadata"),
        ("GET http://10.0.0.1/ HTTP/1.1", "private"),
        ("GET https://a.example/ HTTP/1.1", "scheme"),
        ("GET ftp://a.example/ HTTP/1.1", "scheme"),
        ("GET / HTTP/1.1", "scheme"),
        ("CONNECT a.example HTTP/1.1", "bad_host"),
        ("CONNECT a.example:22 HTTP/1.1", "port"),
        ("GET http://a.example\\@127.0.0.1/ HTTP/1.1", "scheme"),
        ("GET http://inside.example/ HTTP/1.1", "private"),
        ("CONNECT inside.example:443 HTTP/1.1", "private"),
        ("GET http://both.example/ HTTP/1.1", "loopback"),
    ],
)
async def test_what_is_refused_gets_a_page_with_one_sentence_and_is_counted(request_line: str, reason: str) -> None:
    names = {"inside.example": [["10.1.2.3"]], "both.example": [["8.8.8.8", "127.0.0.1"]]}
    async with Server(answering(OK)) as server, admitted(names=names, open_web=True) as access:
        answer = await ask(access, f"{request_line.format(port=server.port)}\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert b"<p>Not reachable: " in answer
        assert access.refused == {reason: 1}
        assert server.connections == 0


async def test_by_default_an_undeclared_host_is_not_even_looked_up() -> None:
    async with admitted({"http://shop.localhost": "127.0.0.1:1"}, names={"a.example": [["8.8.8.8"]]}) as access:
        answer = await ask(access, get("http://a.example/"))
        assert b"a.example:80 is not one of the allowed places: shop.localhost:80 (browser.open_web=false)" in answer
        assert access.refused == {"not_declared": 1}


async def test_a_name_that_changes_its_address_leads_only_where_it_was_checked(loopback_is_public: None) -> None:
    async with Server(answering(OK)) as public, Server(answering(OK)) as inner:
        # The inner server has the port of the public one, on another loopback address.
        twin = await asyncio.start_server(inner._serve, "127.0.0.2", public.port)
        async with twin, admitted(
            names={"rebind.example": [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.1"]]},
            open_web=True, ports=[public.port],
        ) as access:  # fmt: skip
            url = f"http://rebind.example:{public.port}/"
            codes = [(await ask(access, get(url)))[9:12] for _ in range(4)]
        assert codes == [b"200", b"403", b"403", b"200"]
        assert access.refused == {"loopback": 2}
        assert (public.connections, inner.connections) == (2, 0)


async def test_a_redirect_is_a_request_of_its_own_and_refused_like_any(loopback_is_public: None) -> None:
    redirect = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.2/\r\nContent-Length: 0\r\n\r\n"
    async with Server(answering(redirect)) as server:
        names = {"a.example": [["127.0.0.1"]]}
        async with admitted(names=names, open_web=True, ports=[80, server.port]) as access:
            answer = await ask(access, get(f"http://a.example:{server.port}/"))
            assert b"Location: http://127.0.0.2/" in answer
            assert (await ask(access, get("http://127.0.0.2/")))[9:12] == b"403"


@pytest.mark.parametrize(
    "request_text",
    [
        "GET http://a.test/ HTTP/1.1\r\nno header\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\nX: a\nHost: b\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\n folded: x\r\n\r\n",
        "GET http://a.test/ HTTP/2\r\n\r\n",
        "GET http://a.test/ x HTTP/1.1\r\n\r\n",
        "\x16\x03\x01\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\nX: " + "x" * 70_000 + "\r\n\r\n",
    ],
)
async def test_requests_that_could_be_read_in_two_ways_or_not_at_all_go_nowhere(request_text: str) -> None:
    async with Server(answering(OK)) as server, admitted({"http://a.test": f"127.0.0.1:{server.port}"}) as access:
        answer = await ask(access, request_text.encode("latin-1"))
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert server.connections == 0


# Limits


async def test_an_episode_has_so_many_requests() -> None:
    async with (
        Server(answering(OK)) as server,
        admitted({"http://a.test": f"127.0.0.1:{server.port}"}, max_requests=2) as access,
    ):
        answers = [await ask(access, get("http://a.test/")) for _ in range(3)]
    assert [answer[9:12] for answer in answers] == [b"200", b"200", b"403"]
    assert b"the episode has used its 2 requests (browser.max_requests)" in answers[2]
    assert access.refused == {"requests": 1}


@pytest.mark.parametrize("direction", ["down", "up", "tunnel"])
async def test_an_episode_moves_so_many_bytes(direction: str) -> None:
    received = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        if direction != "tunnel":
            await head_of(reader)
        if direction == "down":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        while piece := await reader.read(65536):
            received += len(piece)
            if direction == "tunnel":
                writer.write(piece)

    async with Server(handle) as server:
        origins = {f"{scheme}://a.test": f"127.0.0.1:{server.port}" for scheme in ("http", "https")}
        async with admitted(origins, max_network_mib=1) as access:
            reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
            first = {"down": "GET", "up": "POST", "tunnel": "CONNECT"}[direction]
            target = "a.test:443" if direction == "tunnel" else "http://a.test/"
            length = "Content-Length: 9000000\r\n" if direction == "up" else ""
            writer.write(f"{first} {target} HTTP/1.1\r\n{length}\r\n".encode())
            if direction != "down":
                writer.write(b"x" * 9_000_000)
            assert len(await rest_of(reader)) + received < 3 << 20
            assert access.refused == {"bytes": 1}
            assert b"the episode has used its 1 MiB (browser.max_network_mib)" in await ask(
                access, get("http://a.test/")
            )
            writer.transport.abort()


async def test_a_slow_drip_ends_with_the_limit_of_a_request() -> None:
    drops = 0

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal drops
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            drops += 1
            await asyncio.sleep(0.01)

    async with (
        Server(drip) as server,
        admitted({"http://a.test": f"127.0.0.1:{server.port}"}, request_timeout_seconds=0.3) as access,
    ):
        started = asyncio.get_running_loop().time()
        assert len(await ask(access, get("http://a.test/"))) < 1000
        assert 0.2 < asyncio.get_running_loop().time() - started < 5
        assert drops > 3
        assert access.take_errors("http://a.test/") == [
            "a request took more than 0.3 s (browser.request_timeout_seconds)"
        ]


async def test_an_idle_tunnel_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_connection, "IDLE_SECONDS", 0.2)
    async with Server(echo) as server, admitted({"https://a.test": f"127.0.0.1:{server.port}"}) as access:
        answer = await ask(access, "CONNECT a.test:443 HTTP/1.1\r\n\r\n")
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n"


async def test_an_episode_has_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_webrl.browser.egress.network_access.MAX_CONNECTIONS", 2)
    async with Server(echo) as server, admitted({"https://a.test": f"127.0.0.1:{server.port}"}) as access:
        writers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
            writer.write(b"CONNECT a.test:443 HTTP/1.1\r\n\r\n")
            await head_of(reader)
            writers.append(writer)
        assert b"the episode has 2 connections open" in await ask(access, get("http://a.test/"))
        for writer in writers:
            writer.close()


# Failures, and the end


async def test_what_cannot_be_reached_is_not_answered_but_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "CONNECT_SECONDS", 2.0)
    async with Server(echo) as server:
        port = server.port
    async with admitted({"http://a.test": f"127.0.0.1:{port}", "http://b.test": "gone.example:81"}) as access:
        for host, told in (("a", "a.test:80 cannot be reached: "), ("b", "no address is known for gone.example")):
            assert await ask(access, get(f"http://{host}.test/")) == b""
            (news,) = access.take_errors(f"http://{host}.test/x")
            assert news.startswith(told)
        answer = await ask(access, "CONNECT a.test:80 HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        assert access.refused == {}


async def test_a_name_that_is_not_answered_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "CONNECT_SECONDS", 0.1)

    async def never(host: str) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    gateway = EgressProxy(BrowserConfig(open_web=True), never)
    access = await gateway.open_port({})
    async with asyncio.timeout(SECONDS):
        answer = await ask(access, "CONNECT a.example:443 HTTP/1.1\r\n\r\n")
    assert b"a.example:443 did not answer within 0.1 s" in answer
    await access.close()
    gateway.close()


async def test_the_end_of_an_episode_ends_its_connections_and_its_port() -> None:
    async with Server(echo) as server, admitted({"https://a.test": f"127.0.0.1:{server.port}"}) as access:
        reader, writer = await asyncio.open_connection("127.0.0.1", access.port)
        writer.write(b"CONNECT a.test:443 HTTP/1.1\r\n\r\n")
        await head_of(reader)
        await access.close()
        assert await rest_of(reader) == b""
        writer.close()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", access.port)
        assert not access.connections


async def test_episodes_are_counted_apart_and_together() -> None:
    gateway = EgressProxy(BrowserConfig())
    one, two = await gateway.open_port({}), await gateway.open_port({})
    await ask(one, get("http://a.example/"))
    await ask(two, get("http://169.254.169.254/"))
    await ask(two, get("http://b.example/"))
    assert one.refused == {"not_declared": 1}
    assert two.refused == {"not_declared": 1, "metadata": 1}
    assert gateway.refused == {"not_declared": 2, "metadata": 1}
    assert two.take_errors("http://b.example/page") == [
        "b.example:80 is not one of the allowed places: none (browser.open_web=false)"
    ]
    assert two.take_errors("chrome-error://chromewebdata/") == []
    for access in (one, two):
        await access.close()
    gateway.close()


async def test_the_system_looks_names_up() -> None:
    gateway = EgressProxy(BrowserConfig())
    assert "127.0.0.1" in await gateway._look_up("localhost")
    gateway.close()
