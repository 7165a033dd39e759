"""The egress proxy on real sockets: what it forwards and refuses, its quotas and time limits, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from megatron_webrl.browser.egress import connections
from megatron_webrl.browser.egress import egress_proxy as proxy_module
from megatron_webrl.browser.egress.egress_policy import MAX_LOOKUPS, declared_endpoints
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.config.browser import BrowserConfig
from tests.browser.egress.proxy_client import (
    OK,
    SECONDS,
    Server,
    answering,
    ask,
    echo,
    get,
    head_of,
    open_network,
    open_tunnel,
    rest_of,
    serving,
)


async def test_a_declared_origin_is_reached_at_its_declared_address() -> None:
    heads: list[str] = []
    url = "http://user:pw@SHOP.localhost./a?b=1"
    async with (
        Server(answering(OK, heads)) as server,
        open_network({"http://shop.localhost": f"127.0.0.1:{server.port}"}) as network,
    ):
        answer = await ask(network, get(url, "Proxy-Authorization: x", "Cookie: c"))
    assert (answer[:17], answer[-5:]) == (b"HTTP/1.1 200 OK\r\n", b"hello")
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


async def test_a_304_response_has_no_body() -> None:
    async with serving(answering(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n")) as (_, network):
        assert (await ask(network, get("http://a.test/"))).startswith(b"HTTP/1.1 304 Not Modified\r\n")


async def test_a_tunnel_carries_bytes_both_ways_and_counts_them() -> None:
    async with serving(echo) as (_, network):
        reader, writer = await open_tunnel(network, b"early")
        assert await reader.readexactly(5) == b"early"
        writer.write(b"y" * 300_000)
        assert await reader.readexactly(300_000) == b"y" * 300_000
        writer.close()
        assert network.bytes >= 600_010


async def test_a_websocket_is_reached_by_upgrade() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await head_of(reader)).lower()
        assert "\r\nupgrade: websocket\r\n" in head
        assert "\r\nconnection: upgrade\r\n" in head
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        await echo(reader, writer)

    async with serving(handle) as (_, network):
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket"
        writer.write(f"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n{upgrade}\r\n\r\n".encode())
        assert (await head_of(reader)).startswith("HTTP/1.1 101 ")
        writer.write(b"frame")
        assert await reader.readexactly(5) == b"frame"
        writer.close()


async def test_a_refused_request_gets_a_page_with_one_sentence_and_is_counted() -> None:
    names = {"inside.example": [["10.1.2.3"]] * 2, "both.example": [["8.8.8.8", "127.0.0.1"]]}
    async with Server(answering(OK)) as server, open_network(names=names, open_web=True) as network:
        for request, reason in (
            ("GET http://[::ffff:127.0.0.1]:{port}/", "loopback"),
            ("GET http://localhost:{port}/", "port"),
            ("GET http://a.example@127.0.0.1:{port}/", "loopback"),
            ("CONNECT 0x7f.1:{port}", "loopback"),
            ("CONNECT metadata.google.internal:80", "metadata"),
            ("GET https://a.example/", "scheme"),
            ("GET /", "scheme"),
            ("CONNECT a.example", "bad_host"),
            ("GET http://inside.example/", "private"),
            ("CONNECT inside.example:443", "private"),
            ("GET http://both.example/", "loopback"),
        ):
            network.refused.clear()
            answer = await ask(network, f"{request.format(port=server.port)} HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n"), request
            assert b"<p>Not reachable: " in answer
            assert network.refused == {reason: 1}, request
        assert server.connections == 0


async def test_refusals_are_counted_per_episode_and_in_total() -> None:
    async with open_network({"http://shop.localhost": "127.0.0.1:1"}, names={"a.example": [["8.8.8.8"]]}) as one:
        proxy = EgressProxy(BrowserConfig())
        two, three = await proxy.open_port({}), await proxy.open_port({})
        answer = await ask(one, get("http://a.example/"))
        assert b"a.example:80 is not one of the allowed places: shop.localhost:80 (browser.open_web=false)" in answer
        await ask(two, get("http://a.example/"))
        await ask(three, get("http://169.254.169.254/"))
        await ask(three, get("http://b.example/"))
        assert (one.refused, one.totals.connections) == ({"not_declared": 1}, 0)  # its name was not resolved
        assert (two.refused, three.refused) == ({"not_declared": 1}, {"not_declared": 1, "metadata": 1})
        assert proxy.totals.refused == {"not_declared": 2, "metadata": 1}
        assert three.take_errors("http://b.example/page") == [
            "b.example:80 is not one of the allowed places: none (browser.open_web=false)"
        ]
        assert three.take_errors("chrome-error://chromewebdata/") == []
        for network in (two, three):
            await network.close()
        proxy.close()


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


async def test_ambiguous_or_malformed_requests_are_not_forwarded() -> None:
    get_a, post_a = "GET http://a.test/ HTTP/1.1", "POST http://a.test/ HTTP/1.1\r\nHost: a.test"
    async with serving(answering(OK)) as (server, network):
        for request in (
            get_a,
            get_a + "\r\nHost: a.test\r\nX: a\nHost: b",
            get_a + "\r\nHost: a.test\r\nX : a",
            "GET http://a.test/ HTTP/2",
            "\x16\x03\x01",
            post_a + "\r\nContent-Length: 1\r\nContent-Length: 2",
            post_a + "\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
            post_a + "\r\nTransfer-Encoding: gzip, chunked",
            post_a + "\r\nContent-Length: +1",
            get_a + "\r\nHost: a.test\r\nX: " + "x" * 140_000,
        ):
            answer = await ask(network, f"{request}\r\n\r\n".encode("latin-1"))
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n"), request[:99]
        assert server.connections == 0


async def test_an_episode_has_limits_of_requests_and_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(answering(OK), max_requests=2) as (_, network):
        answers = [await ask(network, get("http://a.test/")) for _ in range(3)]
    assert [answer[9:12] for answer in answers] == [b"200", b"200", b"403"]
    assert b"the episode has used its 2 requests (browser.max_requests)" in answers[2]
    assert network.refused == {"requests": 1}
    monkeypatch.setattr("megatron_webrl.browser.egress.egress_policy.MAX_CONNECTIONS", 2)
    async with serving(echo) as (_, network):
        writers = [(await open_tunnel(network))[1] for _ in range(2)]
        assert b"the episode has 2 connections open" in await ask(network, get("http://a.test/"))
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("direction", ["down", "up", "tunnel"])
async def test_an_episode_has_a_limit_of_bytes(direction: str) -> None:
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

    async with serving(handle, max_network_mib=1) as (_, network):
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        first = {"down": "GET", "up": "POST", "tunnel": "CONNECT"}[direction]
        target = "a.test:443" if direction == "tunnel" else "http://a.test/"
        length = "Content-Length: 9000000\r\n" if direction == "up" else ""
        writer.write(f"{first} {target} HTTP/1.1\r\nHost: a.test\r\n{length}\r\n".encode())
        if direction != "down":
            writer.write(b"x" * 9_000_000)
        assert len(await rest_of(reader)) + received < 3 << 20
        assert network.refused == {"bytes": 1}
        again = await ask(network, get("http://a.test/"))
        assert b"the episode has used its 1 MiB (browser.max_network_mib)" in again
        writer.transport.abort()


async def test_a_slow_response_ends_at_the_time_limit_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
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

    async with serving(drip) as (_, network):
        started = asyncio.get_running_loop().time()
        assert len(await ask(network, get("http://a.test/"))) < 1000
        assert 0.2 < asyncio.get_running_loop().time() - started < 5
        assert drops > 3
        assert network.take_errors("http://a.test/") == ["a request took more than 0.3 s"]


async def test_an_idle_tunnel_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.2)
    async with serving(echo) as (_, network):
        reader, writer = await open_tunnel(network)
        assert await rest_of(reader) == b""
        writer.close()


async def test_an_unreachable_server_gets_no_response_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "CONNECT_SECONDS", 2.0)
    async with Server(echo) as server:
        port = server.port
    async with open_network({"http://a.test": f"127.0.0.1:{port}", "http://b.test": "gone.example:81"}) as network:
        for host, message in (("a", "a.test:80 cannot be reached: "), ("b", "no address is known for gone.example")):
            assert await ask(network, get(f"http://{host}.test/")) == b""
            [error] = network.take_errors(f"http://{host}.test/x")
            assert error.startswith(message)
        answer = await ask(network, "CONNECT a.test:80 HTTP/1.1\r\nHost: a.test\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        assert network.refused == {}


async def test_the_addresses_of_a_name_are_tried_in_turn() -> None:
    async with Server(answering(OK)) as server:
        names = {"two.example": [["127.0.0.2", "127.0.0.1"]]}  # nothing listens at the first
        async with open_network({"http://a.test": f"two.example:{server.port}"}, names) as network:
            assert (await ask(network, get("http://a.test/"))).endswith(b"hello")


async def test_a_look_up_times_out_and_holds_its_permit_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "CONNECT_SECONDS", 0.05)
    running, release, real = 0, threading.Event(), socket.getaddrinfo

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal running
        if ".example" not in f"{arguments}{options}":  # of another thread of this process
            return real(*arguments, **options)
        running += 1
        release.wait(SECONDS)
        raise OSError("no such name")

    monkeypatch.setattr(proxy_module.socket, "getaddrinfo", slow)
    proxy = EgressProxy(BrowserConfig(open_web=True))
    assert "127.0.0.1" in await proxy._look_up("localhost")
    one, two = await proxy.open_port({}), await proxy.open_port({})
    try:
        async with asyncio.timeout(SECONDS):
            for number in range(MAX_LOOKUPS + 3):  # one after the other, each until its time limit
                answer = await ask(one, f"CONNECT a{number}.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
                assert f"a{number}.example:443 did not answer within 0.05 s".encode() in answer
            assert running == MAX_LOOKUPS
            lookups = [thread.daemon for thread in threading.enumerate() if thread.name == "lookup"]
            assert lookups == [True] * MAX_LOOKUPS  # they do not keep the process from ending
            await ask(two, "CONNECT b.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert running == MAX_LOOKUPS + 1
            release.set()
            while one.lookup_semaphore.locked():
                await asyncio.sleep(0.01)
            await ask(one, "CONNECT c.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert running == MAX_LOOKUPS + 2
    finally:
        release.set()
        for network in (one, two):
            await network.close()
        proxy.close()


async def test_names_of_the_web_are_absolute_and_declared_ones_as_declared() -> None:
    asked = []

    async def resolve(host: str) -> list[str]:
        asked.append(host)
        raise OSError("no such name")

    proxy = EgressProxy(BrowserConfig(open_web=True), resolve)
    network = await proxy.open_port(declared_endpoints(["http://shop.test"], {"shop.test": "shop-server:8000"}))
    for host in ("web.example", "web.example.", "intranet", "shop.test"):
        await ask(network, get(f"http://{host}/"))
    assert asked == ["web.example.", "web.example.", "intranet.", "shop-server"]
    await network.close()
    proxy.close()


async def test_closing_an_episode_closes_its_connections_and_its_port() -> None:
    async with serving(echo) as (_, network):
        reader, writer = await open_tunnel(network)
        await network.close()
        assert await rest_of(reader) == b""
        writer.close()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", network.port)
        assert not network.connections
