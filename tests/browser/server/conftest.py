"""Browser servers as processes, and a plain HTTP client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[3]
SMALL = ("browser.width=320", "browser.height=240", "browser.screenshot=png")
LIMIT = 60.0  # seconds, of anything that is waited for


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Http:
    """Requests to one server, each with `headers` unless it has its own."""

    client: aiohttp.ClientSession
    url: str
    headers: dict[str, str] | None = None

    async def __call__(self, method: str, path: str, **options: Any) -> Answer:
        async with self.client.request(method, self.url + path, **{"headers": self.headers, **options}) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def lease(self, **options: Any) -> str:
        answer = await self("POST", "/v1/leases", json=options)
        assert answer.status == 201, answer.body
        return answer.json["id"]

    async def reset(self, lease: str, environment: str, seed: int = 1, source: str = "miniwob") -> Answer:
        asked = {"source": source, "environment": environment, "seed": seed}
        return await self("POST", f"/v1/leases/{lease}/reset", json=asked)

    async def begin_waiting(self, lease: str, seconds: float = 5) -> asyncio.Task[Answer]:
        """A step of so many seconds, once it is under way."""
        step = asyncio.create_task(self("POST", f"/v1/leases/{lease}/step", json={"kind": "wait", "time": seconds}))

        async def acting() -> bool:
            return (await self("GET", f"/v1/leases/{lease}")).json["state"] == "acting"

        await until_async(acting, "a step under way")
        return step

    async def until_free(self, sessions: int) -> None:
        async def free() -> bool:
            return (await self("GET", "/v1/state")).json["free"] == sessions

        await until_async(free, "all places free")


@contextmanager
def browser_server(*arguments: str, sessions: int = 3, **environment: str) -> Iterator[Server]:
    """A browser server with small pages as a ready process; it and its descendants are ended afterwards."""
    with tempfile.TemporaryDirectory() as temporary:
        file, log = Path(temporary) / "address", Path(temporary) / "log"
        command = [
            sys.executable, "-m", "megatron_webrl", "browsers", "serve", "--sessions", str(sessions), *arguments,
            *SMALL, "--die-with-parent", "--port", "0", "--address-file", str(file),
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, **environment}
            )
        try:
            until(lambda: file.exists() or process.poll() is not None, "an address")
            assert file.exists(), log.read_text()
            yield Server(json.loads(file.read_text())["url"], process)
        finally:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(LIMIT)
            finally:
                process.kill()
                for child in below:
                    with suppress(psutil.NoSuchProcess):
                        child.kill()


async def until_async(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not await condition():
        assert time.monotonic() < deadline, f"not within {LIMIT} s: {what}"
        await asyncio.sleep(0.02)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=LIMIT)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session
