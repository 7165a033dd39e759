"""A thousand slow connections to a browser server, while an honest client leases sessions on connections of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from megatron_webrl.control import child_process
from megatron_webrl.control.http.http_service import ConnectionLimits
from tests.browser.server.conftest import browser_server
from tests.waiting import until

SECONDS = 75.0
MARGIN_SECONDS = 3.0  # of a loaded machine, added to the limit of a connection
BYTE_SECONDS = 0.5  # between two bytes of a slow request
PAUSE_SECONDS = 0.05  # between two leases, and before a connection that was closed is made again
GET = b"GET /v1/leases/none HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
LIMITS = ConnectionLimits()
# First bytes of a connection, whether more of them trickle, and the most seconds that it may last.
KINDS = {
    "mute": (b"", False, LIMITS.request_seconds),
    "slow head": (GET[:-2] + b"X: ", True, LIMITS.request_seconds),
    "slow body": (POST, True, LIMITS.request_seconds),
    "idle": (GET, False, LIMITS.idle_seconds),
}


@pytest.mark.alone
@pytest.mark.soak
def test_a_thousand_slow_connections_end_and_delay_no_lease() -> None:
    context = multiprocessing.get_context("spawn")
    with browser_server(sessions=4, WEBRL_BROWSERS_TOKEN="") as server, context.Manager() as manager:
        service = psutil.Process(server.process.pid)
        before, longest, connected = service.num_fds(), manager.dict(), context.Event()
        port = int(server.url.rpartition(":")[2])
        attack = context.Process(target=attack_service, args=(port, longest, connected))
        attack.start()
        assert connected.wait(60.0)
        times = asyncio.run(lease(server.url))
        attack.join()
        assert np.percentile(times, 99) < 1.0
        assert len(times) > 20
        for kind, (_, _, limit) in KINDS.items():
            assert min(9.0, limit) < longest[kind] < limit + MARGIN_SECONDS, kind
        until(lambda: service.num_fds() <= before + 5, lambda: f"{service.num_fds()} files, {before} before", 20.0)


async def lease(server: str) -> list[float]:
    """Lease and release on connections of their own; returns the seconds of each."""
    times: list[float] = []
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as http:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            started = time.monotonic()
            async with http.post(f"{server}/v1/leases", json={"seconds": 30}, raise_for_status=True) as answer:
                lease = await answer.json()
            async with http.delete(f"{server}/v1/leases/{lease['id']}", raise_for_status=True):
                times.append(time.monotonic() - started)
            await asyncio.sleep(PAUSE_SECONDS)
    return times


def attack_service(port: int, longest: dict[str, float], connected: Any) -> None:
    """Process that keeps slow connections; writes the seconds of the longest one of each kind."""
    child_process.die_with_parent(signal.SIGKILL)
    longest.update(dict.fromkeys(KINDS, 0.0))

    async def keep(kind: str, opened: asyncio.Semaphore) -> None:
        first, trickle, _ = KINDS[kind]
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            started, closed = time.monotonic(), asyncio.ensure_future(reader.read())
            opened.release()
            writer.write(first)
            while not closed.done():
                await asyncio.wait({closed}, timeout=BYTE_SECONDS)
                writer.write(b"x" * trickle)
            await asyncio.gather(closed, return_exceptions=True)
            longest[kind] = max(longest[kind], time.monotonic() - started)
            writer.transport.abort()
            await asyncio.sleep(PAUSE_SECONDS)

    async def run() -> None:
        opened = asyncio.Semaphore(0)
        tasks = [asyncio.ensure_future(keep(kind, opened)) for _ in range(250) for kind in KINDS]
        for _ in tasks:
            await opened.acquire()
        connected.set()
        await asyncio.sleep(SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
