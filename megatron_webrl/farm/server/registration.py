"""A node tells a router that it is there."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from megatron_webrl.farm.protocol import API_PREFIX, dump
from megatron_webrl.farm.server.browser_server import BrowserServer

log = logging.getLogger(__name__)

REGISTRATION_INTERVAL_SECONDS = 2.0
JITTER = 0.25  # of it, so that the nodes of a cluster do not speak all at once
RESPONSE_TIMEOUT_SECONDS = 5.0


@asynccontextmanager
async def register_with_router(server: BrowserServer, router: str | None, token: str | None) -> AsyncIterator[None]:
    """Send the node's state to the router, if there is one, every EVERY_SECONDS and when a full node has room again.

    A router that cannot be reached is tried again and again: it may be starting.
    """
    if router is None:
        yield
        return
    running = asyncio.get_running_loop().create_task(_announce(server, router.rstrip("/"), token))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _announce(node: BrowserServer, router: str, token: str | None) -> None:
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    problem: str | None = None
    timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as client:
        while True:
            node.capacity_freed.clear()
            before, problem = problem, await _tell(client, f"{router}{API_PREFIX}/servers", dump(node.state()))
            if problem != before:
                log.log(
                    logging.WARNING if problem else logging.INFO, "router %s: %s", router, problem or "knows this node"
                )
            try:
                async with asyncio.timeout(REGISTRATION_INTERVAL_SECONDS * random.uniform(1 - JITTER, 1 + JITTER)):
                    await node.capacity_freed.wait()
            except TimeoutError:
                pass


async def _tell(client: aiohttp.ClientSession, url: str, state: bytes) -> str | None:
    """What went wrong, if something did."""
    try:
        async with client.post(url, data=state) as answer:
            return None if answer.status == 204 else f"status {answer.status}: {(await answer.text())[:200]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
