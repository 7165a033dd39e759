"""The egress proxy on real sockets: what it forwards and what it refuses."""

from __future__ import annotations

import asyncio

import pytest

from tests.browser.egress.proxy_client import OK, Server, answering, ask, echo, get, head_of, open_network


async def test_a_declared_origin_is_reached_at_its_declared_address() -> None:
    heads: list[str] = []
    url = "http://user:pw@SHOP.localhost./a?b=1"
    async with (
        Server(answering(OK, heads)) as server,
        open_network({"http://shop.localhost": f"127.0.0.1:{server.port}"}) as network,
    ):
        answer = await ask(network, get(url, "Proxy-Authorization: x", "Cookie: c"))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"hello")
    lines = heads[0].split("\r\n")
    assert lines[:2] == ["GET /a?b=1 HTTP/1.1", "Host: shop.localhost"]
    assert "Cookie: c" in lines
    assert "proxy-authorization" not in heads[0].lower()
    assert network.requests == 1


async def test_requests_for_two_origins_on_one_connection_reach_both() -> None:
    other = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother"
    async with Server(answering(OK)) as one, Server(answering(other)) as two:
        origins = {"http://a.test": f"127.0.0.1:{one.port}", "http://b.test": f"127.0.0.1:{two.port}"}
        async with open_network(origins) as network:
            reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
            for host, body in (("a", b"hello"), ("b", b"other"), ("a", b"hello")):
                writer.write(f"GET http://{host}.test/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await head_of(reader)
                assert await reader.readexactly(5) == body
            writer.close()


@pytest.mark.parametrize(
    ("framing", "body"),
    [("Content-Length: 200000", b"x" * 200_000), ("Transfer-Encoding: chunked", b"4\r\nabcd\r\n0\r\n\r\n")],
)
async def test_a_request_body_reaches_the_server_complete(framing: str, body: bytes) -> None:
    received = asyncio.get_running_loop().create_future()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        received.set_result(await reader.readexactly(len(body)))
        writer.write(OK)

    async with Server(handle) as server, open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as network:
        answer = await ask(
            network,
            f"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\n{framing}\r\nConnection: close\r\n\r\n".encode() + body,
        )
        assert answer.endswith(b"hello")
        assert await received == body


async def test_head_and_304_responses_have_no_body_and_early_hints_are_forwarded() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n"
    async with (
        Server(answering(early)) as server,
        open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as network,
    ):
        answer = await ask(network, get("http://a.test/"))
        assert [line for line in answer.decode().split("\r\n") if line.startswith("HTTP")] == [
            "HTTP/1.1 103 Early Hints", "HTTP/1.1 304 Not Modified",
        ]  # fmt: skip


async def test_a_tunnel_carries_bytes_both_ways_and_counts_them() -> None:
    async with Server(echo) as server, open_network({"https://a.test": f"127.0.0.1:{server.port}"}) as network:
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        writer.write(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\nearly")
        assert (await head_of(reader)).startswith("HTTP/1.1 200 ")
        assert await reader.readexactly(5) == b"early"
        writer.write(b"y" * 300_000)
        assert await reader.readexactly(300_000) == b"y" * 300_000
        writer.close()
        assert network.bytes >= 600_010


@pytest.mark.parametrize("way", ["upgrade", "tunnel"])
async def test_a_websocket_is_reached_by_upgrade_and_through_a_tunnel(way: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await head_of(reader)).lower()
        assert "\r\nupgrade: websocket\r\n" in head
        assert "\r\nconnection: upgrade\r\n" in head
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        await echo(reader, writer)

    async with Server(handle) as server, open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as network:
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        target = "http://a.test/" if way == "upgrade" else "/"
        if way == "tunnel":
            writer.write(b"CONNECT a.test:80 HTTP/1.1\r\nHost: a.test\r\n\r\n")
            await head_of(reader)
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode()
        )
        assert (await head_of(reader)).startswith("HTTP/1.1 101 ")
        writer.write(b"frame")
        assert await reader.readexactly(5) == b"frame"
        writer.close()


# Refusals


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
async def test_a_refused_request_gets_a_page_with_one_sentence_and_is_counted(request_line: str, reason: str) -> None:
    names = {"inside.example": [["10.1.2.3"]], "both.example": [["8.8.8.8", "127.0.0.1"]]}
    async with Server(answering(OK)) as server, open_network(names=names, open_web=True) as network:
        answer = await ask(network, f"{request_line.format(port=server.port)}\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert b"<p>Not reachable: " in answer
        assert network.refused == {reason: 1}
        assert server.connections == 0


async def test_by_default_an_undeclared_host_is_not_resolved() -> None:
    async with open_network({"http://shop.localhost": "127.0.0.1:1"}, names={"a.example": [["8.8.8.8"]]}) as network:
        answer = await ask(network, get("http://a.example/"))
        assert b"a.example:80 is not one of the allowed places: shop.localhost:80 (browser.open_web=false)" in answer
        assert network.refused == {"not_declared": 1}


async def test_a_name_that_changes_its_address_reaches_only_checked_addresses(first_loopback_is_public: None) -> None:
    async with Server(answering(OK)) as public, Server(answering(OK)) as inner:
        # The inner server has the port of the public one, on another loopback address.
        twin = await asyncio.start_server(inner._serve, "127.0.0.2", public.port)
        async with twin, open_network(
            names={"rebind.example": [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.1"]]},
            open_web=True, ports=[public.port],
        ) as network:  # fmt: skip
            url = f"http://rebind.example:{public.port}/"
            codes = [(await ask(network, get(url)))[9:12] for _ in range(4)]
        assert codes == [b"200", b"403", b"403", b"200"]
        assert network.refused == {"loopback": 2}
        assert (public.connections, inner.connections) == (2, 0)


async def test_a_redirect_target_is_checked_like_any_request(first_loopback_is_public: None) -> None:
    redirect = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.2/\r\nContent-Length: 0\r\n\r\n"
    async with Server(answering(redirect)) as server:
        names = {"a.example": [["127.0.0.1"]]}
        async with open_network(names=names, open_web=True, ports=[80, server.port]) as network:
            answer = await ask(network, get(f"http://a.example:{server.port}/"))
            assert b"Location: http://127.0.0.2/" in answer
            assert (await ask(network, get("http://127.0.0.2/")))[9:12] == b"403"


@pytest.mark.parametrize(
    "request_text",
    [
        "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nno header\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: a\nHost: b\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: a\rY: b\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX : a\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\n folded: x\r\nHost: a.test\r\n\r\n",
        "GET http://a.test/ HTTP/2\r\n\r\n",
        "GET http://a.test/ x HTTP/1.1\r\n\r\n",
        "\x16\x03\x01\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: \xa0chunked\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: +1\r\n\r\n",
        "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: -1\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: " + "x" * 140_000 + "\r\n\r\n",
    ],
)
async def test_ambiguous_or_malformed_requests_are_not_forwarded(request_text: str) -> None:
    async with Server(answering(OK)) as server, open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as network:
        answer = await ask(network, request_text.encode("latin-1"))
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert server.connections == 0
