"""Drill: slow connections to a browser server, while an honest client leases sessions.

  python -m tools.drills.browser_connections           1,000 connections for 75 s
  python -m tools.drills.browser_connections --quick   100 for 15 s

Goals: a lease and its release take less than 1 s at p99 on connections of their own, and all succeed; no slow
connection outlives its limit; the server has as many open files afterwards as before. Exit code 0 if all hold.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import psutil

from megatron_webrl.control import child_process
from megatron_webrl.control.http.http_service import ConnectionLimits
from tests.browser.server.conftest import Server, browser_server
from tests.waiting import until
from tools.arguments import make_bench_parser, write_json

P99_SECONDS = 1.0
MARGIN_SECONDS = 3.0  # of a loaded machine, added to the limit of a connection
BYTE_SECONDS = 0.5  # between two bytes of a slow request
PAUSE_SECONDS = 0.05  # of the honest client between two leases, and of others before they connect again
FILES_SECONDS = 20.0
CONNECT_SECONDS = 60.0  # limit for all connections to be made, or closed
SESSIONS = 4
GET = b"GET /v1/leases/none HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
RECEIVE_BYTES = 4096  # of the slow clients' sockets
TCP_ESTABLISHED = 1


@dataclass
class SlowConnections:
    """Connections that were made, and seconds of the longest one, by kind."""

    made: dict[str, int] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)


@dataclass
class DrillResult:
    """Figures of a drill."""

    connections: int
    seconds: float
    leases: int = 0
    p50_seconds: float = 0.0
    p99_seconds: float = 0.0
    slow: SlowConnections = field(default_factory=SlowConnections)
    problems: list[str] = field(default_factory=list)


async def _mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> None:
    closed = asyncio.ensure_future(reader.read())
    try:
        writer.write(first)
        while not closed.done():
            await asyncio.wait({closed}, timeout=BYTE_SECONDS)
            writer.write(b"x")
    finally:
        closed.cancel()
        await asyncio.gather(closed, return_exceptions=True)


async def _slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _trickle(reader, writer, GET[:-2] + b"X: ")


async def _slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _trickle(reader, writer, POST)


async def _idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GET)
    await reader.read()


async def _unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET.replace(b"/v1/leases/none", b"/openapi.json"))
    connection = writer.get_extra_info("socket")
    while connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED:
        await asyncio.sleep(BYTE_SECONDS)


_Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
_LIMITS = ConnectionLimits()
KINDS: dict[str, tuple[_Behaviour, float]] = {
    "mute": (_mute, _LIMITS.request_seconds),
    "slow head": (_slow_head, _LIMITS.request_seconds),
    "slow body": (_slow_body, _LIMITS.request_seconds),
    "idle": (_idle, _LIMITS.idle_seconds),
    "unread": (_unread, math.inf),  # a client that reads nothing does not see that the service has closed it
}
"""Behaviour of a slow connection, and the most seconds that it may last."""


def main() -> int:
    """Run the drill; returns 0 if its goals hold."""
    options = make_bench_parser(__doc__, "100 connections for 15 s").parse_args()
    result = run_drill(*((100, 15.0) if options.quick else (1000, 75.0)))
    write_json(options.json, asdict(result))
    print(
        f"{result.connections} slow connections for {result.seconds:g} s: "
        f"{result.leases} leases, p50 {result.p50_seconds * 1000:.0f} ms, p99 {result.p99_seconds * 1000:.0f} ms"
    )
    for kind, longest in result.slow.longest.items():
        print(f"  {kind}: {result.slow.made[kind]} connections, the longest {longest:.1f} s")
    print("\n".join(result.problems) or "passed")
    return 1 if result.problems else 0


def run_drill(connections: int, seconds: float) -> DrillResult:
    """Make slow connections to a new browser server for some time."""
    result = DrillResult(connections, seconds)
    with browser_server(sessions=SESSIONS, WEBRL_BROWSERS_TOKEN="") as server:
        before = _open_files(server)
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        attack = context.Process(target=_attack, args=(server.url, connections, seconds, sender), daemon=True)
        attack.start()
        sender.close()  # else the end of the process would not be seen
        _receive(receiver, CONNECT_SECONDS)  # every connection has been made
        times, failures = asyncio.run(_lease(server.url, seconds))
        result.slow = _receive(receiver, CONNECT_SECONDS)
        attack.join()
        result.problems += _problems(result, times, failures)
        try:
            until(lambda: _open_files(server) <= before + 5, "files", FILES_SECONDS)
        except AssertionError:
            result.problems.append(f"the server has {_open_files(server)} open files, {before} before")
    return result


def _receive(receiver: Connection, seconds: float) -> Any:
    """A message of the process of the slow connections. Raises EOFError if it has ended, TimeoutError."""
    if not receiver.poll(seconds):
        raise TimeoutError(f"no message of the slow connections within {seconds:g} s")
    return receiver.recv()


def _problems(result: DrillResult, times: list[float], failures: Counter[str]) -> list[str]:
    """Fill in the figures and compare them with the goals."""
    result.leases = len(times)
    if times:
        result.p50_seconds, result.p99_seconds = (float(np.percentile(times, share)) for share in (50, 99))
    problems = [f"{count} leases failed: {reason}" for reason, count in failures.items()]
    if result.p99_seconds >= P99_SECONDS or not times:
        problems.append(f"a lease takes {result.p99_seconds:.2f} s at p99, not less than {P99_SECONDS:g} s")
    for kind, longest in result.slow.longest.items():
        if longest > KINDS[kind][1] + MARGIN_SECONDS:
            problems.append(f"{kind}: a connection lasted {longest:.1f} s, not at most {KINDS[kind][1]:g} s")
    return problems


async def _lease(server: str, seconds: float) -> tuple[list[float], Counter[str]]:
    """Lease and release on connections of their own: seconds of each, and failures by reason."""
    times: list[float] = []
    failures: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as http:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or not times:
            started = time.monotonic()
            try:
                async with http.post(f"{server}/v1/leases", json={"seconds": 30}, raise_for_status=True) as answer:
                    lease = await answer.json()
                async with http.delete(f"{server}/v1/leases/{lease['id']}", raise_for_status=True):
                    times.append(time.monotonic() - started)
            except (aiohttp.ClientError, TimeoutError) as error:
                failures[f"{type(error).__name__}: {error}"] += 1
            await asyncio.sleep(PAUSE_SECONDS)
    return times, failures


def _attack(url: str, connections: int, seconds: float, sender: Connection) -> None:
    """Process of the slow connections."""
    child_process.die_with_parent(signal.SIGKILL)
    asyncio.run(_keep_connections(url, connections, seconds, sender))


async def _keep_connections(url: str, connections: int, seconds: float, sender: Connection) -> None:
    found, opened = SlowConnections(), asyncio.Semaphore(0)
    port, kinds = urlsplit(url).port, list(KINDS)
    tasks = [
        asyncio.ensure_future(_connect_again(port, kinds[number % len(kinds)], found, opened))
        for number in range(connections)
    ]
    for _ in tasks:
        await opened.acquire()
    sender.send("connected")
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    sender.send(found)


async def _connect_again(port: int | None, kind: str, found: SlowConnections, opened: asyncio.Semaphore) -> None:
    """Keep one slow connection: whenever it is closed, make another."""
    while True:
        with suppress(OSError):
            reader, writer = await _connect(port)
            started = time.monotonic()
            found.made[kind] = found.made.get(kind, 0) + 1
            opened.release()
            try:
                await KINDS[kind][0](reader, writer)
            finally:
                found.longest[kind] = max(found.longest.get(kind, 0.0), time.monotonic() - started)
                writer.transport.abort()
        await asyncio.sleep(PAUSE_SECONDS)


async def _connect(port: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket()
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection)


def _open_files(service: Server) -> int:
    return psutil.Process(service.process.pid).num_fds()


if __name__ == "__main__":
    sys.exit(main())
