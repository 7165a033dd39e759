"""Heartbeats of a browser server to its router."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from megatron_webrl.browser.server.browser_server import BrowserServer
from megatron_webrl.browser.server.http_client import tls_context
from megatron_webrl.browser.server.protocol import API_PREFIX, bearer_header, dump
from megatron_webrl.control.http.tokens import Token

log = logging.getLogger(__name__)

REGISTRATION_INTERVAL_SECONDS = 2.0
JITTER = 0.25  # fraction of the interval; spreads the heartbeats of a cluster over time
RESPONSE_TIMEOUT_SECONDS = 5.0


@asynccontextmanager
async def register_with_router(server: BrowserServer, router: str | None, token: Token | None) -> AsyncIterator[None]:
    """Send the server's state to `router`, if any, every REGISTRATION_INTERVAL_SECONDS and when a full server has room.
    Failures are retried without limit: the router may be starting. Raises ConfigError.
    """
    if router is None:
        yield
        return
    running = asyncio.get_running_loop().create_task(_send_heartbeats(server, router.rstrip("/"), token, tls_context()))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _send_heartbeats(server: BrowserServer, router: str, token: Token | None, tls: ssl.SSLContext) -> None:
    headers = {"Content-Type": "application/json"} | bearer_header(token.value if token else None)
    why: str | None = None
    timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as client:
        while True:
            server.capacity_freed.clear()
            previous, why = why, await _send(client, f"{router}{API_PREFIX}/servers", dump(server.state()))
            if why != previous:
                log.log(
                    logging.WARNING if why else logging.INFO, "router %s: %s", router, why or "registered this server"
                )
            try:
                async with asyncio.timeout(REGISTRATION_INTERVAL_SECONDS * random.uniform(1 - JITTER, 1 + JITTER)):
                    await server.capacity_freed.wait()
            except TimeoutError:
                pass


async def _send(client: aiohttp.ClientSession, url: str, state: bytes) -> str | None:
    """Send one heartbeat; returns the problem, if there was one."""
    try:
        async with client.post(url, data=state) as response:
            return None if response.status == 204 else f"status {response.status}: {(await response.text())[:200]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
