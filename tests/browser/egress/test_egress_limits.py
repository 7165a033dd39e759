"""Quotas, time limits and failures of the egress proxy, and the end of an episode."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
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
    rest_of,
)


async def test_an_episode_has_a_limit_of_requests() -> None:
    async with (
        Server(answering(OK)) as server,
        open_network({"http://a.test": f"127.0.0.1:{server.port}"}, max_requests=2) as network,
    ):
        answers = [await ask(network, get("http://a.test/")) for _ in range(3)]
    assert [answer[9:12] for answer in answers] == [b"200", b"200", b"403"]
    assert b"the episode has used its 2 requests (browser.max_requests)" in answers[2]
    assert network.refused == {"requests": 1}


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

    async with Server(handle) as server:
        origins = {f"{scheme}://a.test": f"127.0.0.1:{server.port}" for scheme in ("http", "https")}
        async with open_network(origins, max_network_mib=1) as network:
            reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
            first = {"down": "GET", "up": "POST", "tunnel": "CONNECT"}[direction]
            target = "a.test:443" if direction == "tunnel" else "http://a.test/"
            length = "Content-Length: 9000000\r\n" if direction == "up" else ""
            writer.write(f"{first} {target} HTTP/1.1\r\nHost: a.test\r\n{length}\r\n".encode())
            if direction != "down":
                writer.write(b"x" * 9_000_000)
            assert len(await rest_of(reader)) + received < 3 << 20
            assert network.refused == {"bytes": 1}
            assert b"the episode has used its 1 MiB (browser.max_network_mib)" in await ask(
                network, get("http://a.test/")
            )
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

    async with (
        Server(drip) as server,
        open_network({"http://a.test": f"127.0.0.1:{server.port}"}) as network,
    ):
        started = asyncio.get_running_loop().time()
        assert len(await ask(network, get("http://a.test/"))) < 1000
        assert 0.2 < asyncio.get_running_loop().time() - started < 5
        assert drops > 3
        assert network.take_errors("http://a.test/") == ["a request took more than 0.3 s"]


async def test_an_idle_tunnel_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.2)
    async with Server(echo) as server, open_network({"https://a.test": f"127.0.0.1:{server.port}"}) as network:
        answer = await ask(network, "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n")
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n"


async def test_an_episode_has_a_limit_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_webrl.browser.egress.egress_policy.MAX_CONNECTIONS", 2)
    async with Server(echo) as server, open_network({"https://a.test": f"127.0.0.1:{server.port}"}) as network:
        writers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
            writer.write(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n")
            await head_of(reader)
            writers.append(writer)
        assert b"the episode has 2 connections open" in await ask(network, get("http://a.test/"))
        for writer in writers:
            writer.close()


# Unreachable servers, and the end of an episode


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


async def test_a_look_up_without_an_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "CONNECT_SECONDS", 0.1)

    async def never(host: str) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    proxy = EgressProxy(BrowserConfig(open_web=True), never)
    network = await proxy.open_port({})
    async with asyncio.timeout(SECONDS):
        answer = await ask(network, "CONNECT a.example:443 HTTP/1.1\r\nHost: a.test\r\n\r\n")
    assert b"a.example:443 did not answer within 0.1 s" in answer
    await network.close()
    proxy.close()


async def test_a_look_up_holds_its_permit_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
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
    one, two = await proxy.open_port({}), await proxy.open_port({})
    try:
        async with asyncio.timeout(SECONDS):
            for number in range(MAX_LOOKUPS + 3):  # one after the other, each until its time limit
                await ask(one, f"CONNECT a{number}.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert running == MAX_LOOKUPS
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


def test_a_look_up_that_does_not_end_does_not_keep_the_process_from_ending() -> None:
    script = """
import asyncio, socket, threading
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.config.browser import BrowserConfig
socket.getaddrinfo = lambda *arguments, **options: threading.Event().wait()
async def main():
    proxy = EgressProxy(BrowserConfig(open_web=True))
    network = await proxy.open_port({})
    reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
    writer.write(b"CONNECT a.example:443 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    while not any(thread.name == "lookup" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
    await network.close()
    proxy.close()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


async def test_names_of_the_web_are_absolute_and_declared_ones_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
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
    async with Server(echo) as server, open_network({"https://a.test": f"127.0.0.1:{server.port}"}) as network:
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        writer.write(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n")
        await head_of(reader)
        await network.close()
        assert await rest_of(reader) == b""
        writer.close()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", network.port)
        assert not network.connections


async def test_refusals_are_counted_per_episode_and_in_total() -> None:
    proxy = EgressProxy(BrowserConfig())
    one, two = await proxy.open_port({}), await proxy.open_port({})
    await ask(one, get("http://a.example/"))
    await ask(two, get("http://169.254.169.254/"))
    await ask(two, get("http://b.example/"))
    assert one.refused == {"not_declared": 1}
    assert two.refused == {"not_declared": 1, "metadata": 1}
    assert proxy.totals.refused == {"not_declared": 2, "metadata": 1}
    assert two.take_errors("http://b.example/page") == [
        "b.example:80 is not one of the allowed places: none (browser.open_web=false)"
    ]
    assert two.take_errors("chrome-error://chromewebdata/") == []
    for network in (one, two):
        await network.close()
    proxy.close()


async def test_names_are_resolved_by_the_system() -> None:
    proxy = EgressProxy(BrowserConfig())
    assert "127.0.0.1" in await proxy._look_up("localhost")
    proxy.close()
