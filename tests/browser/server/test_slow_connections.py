"""Slow connections to a browser server, while an honest client leases sessions on connections of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Coroutine
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import psutil
import pytest

from megatron_webrl.control import child_process
from megatron_webrl.control.http.http_service import ConnectionLimits
from tests.browser.server.conftest import browser_server
from tests.waiting import until

MARGIN_SECONDS = 3.0  # of a loaded machine, added to the limit of a connection
BYTE_SECONDS = 0.5  # between two bytes of a slow request
PAUSE_SECONDS = 0.05  # between two leases, and before a connection that was closed is made again
GET = b"GET /v1/leases/none HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
LIMITS = ConnectionLimits()
CONTEXT = multiprocessing.get_context("spawn")


def sending(first: bytes, trickle: bool) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine]:
    """Send some bytes, perhaps more of them slowly, until the service closes the connection."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed = asyncio.ensure_future(reader.read())
        writer.write(first)
        try:
            while not closed.done():
                await asyncio.wait({closed}, timeout=BYTE_SECONDS)
                writer.write(b"x" * trickle)
        finally:
            closed.cancel()
            await asyncio.gather(closed, return_exceptions=True)

    return behave


KINDS = {
    "mute": (sending(b"", False), LIMITS.request_seconds),
    "slow head": (sending(GET[:-2] + b"X: ", True), LIMITS.request_seconds),
    "slow body": (sending(POST, True), LIMITS.request_seconds),
    "idle": (sending(GET, False), LIMITS.idle_seconds),
}
"""Behaviour of a slow connection, and the most seconds that it may last."""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("connections", "seconds"),
    [(100, 12.0), pytest.param(1000, 75.0, marks=pytest.mark.soak)],
)
def test_slow_connections_end_and_delay_no_lease(connections: int, seconds: float) -> None:
    with browser_server(sessions=4, WEBRL_BROWSERS_TOKEN="") as server, CONTEXT.Manager() as manager:
        service = psutil.Process(server.process.pid)
        before, longest, connected = service.num_fds(), manager.dict(), CONTEXT.Event()
        attack = CONTEXT.Process(target=attack_service, args=(server.url, connections, seconds, longest, connected))
        attack.start()
        assert connected.wait(60.0)
        times = asyncio.run(lease(server.url, seconds))
        attack.join()
        assert np.percentile(times, 99) < 1.0
        assert len(times) > 20
        for kind, (_, limit) in KINDS.items():
            assert min(9.0, limit) < longest[kind] < limit + MARGIN_SECONDS, kind
        until(lambda: service.num_fds() <= before + 5, lambda: f"{service.num_fds()} files, {before} before", 20.0)


async def lease(server: str, seconds: float) -> list[float]:
    """Lease and release on connections of their own; returns the seconds of each."""
    times: list[float] = []
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as http:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            started = time.monotonic()
            async with http.post(f"{server}/v1/leases", json={"seconds": 30}, raise_for_status=True) as answer:
                lease = await answer.json()
            async with http.delete(f"{server}/v1/leases/{lease['id']}", raise_for_status=True):
                times.append(time.monotonic() - started)
            await asyncio.sleep(PAUSE_SECONDS)
    return times


def attack_service(url: str, connections: int, seconds: float, longest: Any, connected: Event) -> None:
    """Process that keeps slow connections; writes the seconds of the longest one of each kind."""
    child_process.die_with_parent(signal.SIGKILL)
    found = dict.fromkeys(KINDS, 0.0)
    asyncio.run(keep_connections(urlsplit(url).port, connections, seconds, found, connected))
    longest.update(found)


async def keep_connections(
    port: int | None, connections: int, seconds: float, longest: dict[str, float], connected: Event
) -> None:
    opened, kinds = asyncio.Semaphore(0), list(KINDS)

    async def keep(kind: str) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            started = time.monotonic()
            opened.release()
            try:
                await KINDS[kind][0](reader, writer)
            except ConnectionError:
                pass
            finally:
                longest[kind] = max(longest[kind], time.monotonic() - started)
                writer.transport.abort()
            await asyncio.sleep(PAUSE_SECONDS)

    tasks = [asyncio.ensure_future(keep(kinds[number % len(kinds)])) for number in range(connections)]
    for _ in tasks:
        await opened.acquire()
    connected.set()
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
