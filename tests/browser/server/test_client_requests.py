"""The client against busy, silent and unreachable servers, and its exceptions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from megatron_webrl.browser.errors import BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.server import client, protocol
from megatron_webrl.browser.server.client import BrowserClient, ServerUnreachable
from megatron_webrl.config.browser import BrowserConfig, parse_server_addresses
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.types import Action, Observation
from tests.browser.server.servers import LIMIT


async def test_an_unreachable_server_is_named() -> None:
    async with BrowserClient("http://127.0.0.1:9", "") as browsers:
        with pytest.raises(
            ServerUnreachable, match=r"no browser server within 0 s: http://127.0.0.1:9 cannot be reached"
        ):
            await browsers.wait_until_ready(0.2)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 0.5, None])
def test_a_reward_that_is_no_number_stays_so(reward: float | None) -> None:
    """It must not become a missing one, which does not mask the episode."""
    seen = protocol.decode_observation(protocol.encode_observation(Observation(b"x", "", "", False, reward=reward)))
    assert repr(seen.reward) == repr(reward)


@asynccontextmanager
async def server(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """A server with one handler for all requests."""
    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    await runner.cleanup()


def server_state(free: int = 1) -> web.Response:
    state = protocol.ServerState(free, free, protocol.SessionSpec.from_config(BrowserConfig()))
    return web.Response(body=protocol.dump(state))


def lease(name: str = "a", free: int = 0) -> web.Response:
    return web.Response(status=201, body=protocol.dump(protocol.Lease(name, 60.0, free)))


@asynccontextmanager
async def fake_server(sessions: int, asked: list[str]) -> AsyncIterator[str]:
    """A server that only leases; each request for a lease is counted in `asked` by its address."""
    free = sessions

    async def answer(request: web.Request) -> web.Response:
        nonlocal free
        if request.path.endswith("/state"):
            return server_state(free)
        if request.method == "POST":
            asked.append(f"http://{request.host}")
            if not free:
                return web.Response(status=503, text='{"error": "full"}')
            free -= 1
            return lease(str(free), free)
        free += 1
        return web.Response(status=204)

    async with server(answer) as url:
        yield url


async def test_leases_go_to_the_server_with_the_most_free_sessions() -> None:
    asked: list[str] = []
    async with fake_server(4, asked) as large, fake_server(2, asked) as small:
        async with BrowserClient(f"{small},{large}", "", wait_seconds=5.0) as browsers, AsyncExitStack() as stack:
            await browsers.wait_until_ready(LIMIT)
            used = [(await stack.enter_async_context(browsers.session())).address for _ in range(6)]
            assert used[:2] == [large] * 2  # of 4 and 2, then of 3 and 2
            assert Counter(used) == {large: 4, small: 2}
            assert len(asked) == 6  # no server is asked in vain
        async with BrowserClient(f"{small},{large}", "") as browsers, AsyncExitStack() as stack:
            many = [stack.enter_async_context(browsers.session()) for _ in range(6)]
            assert Counter([each.address for each in await asyncio.gather(*many)]) == {large: 4, small: 2}


async def test_a_server_that_is_away_or_silent_is_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(client, "AWAY_SECONDS", 1.5)
    asked: list[float] = []

    async def silent(request: web.Request) -> web.Response:
        asked.append(time.monotonic())
        await asyncio.sleep(LIMIT)
        return server_state()

    async with (
        server(silent) as mute,
        fake_server(99, []) as well,
        BrowserClient(f"{mute},http://127.0.0.1:9,{well}", "") as browsers,
    ):
        begun = time.monotonic()
        while len(asked) < 2:
            started = time.monotonic()
            async with browsers.session() as session:
                assert session.address == well
            assert time.monotonic() - started < 1.4
            await asyncio.sleep(0.02)
            assert time.monotonic() < begun + LIMIT
    assert asked[1] - asked[0] > 1.9  # the timeout and the time of absence


async def test_a_lease_granted_to_a_cancelled_caller_is_released() -> None:
    asked, answering = asyncio.Event(), asyncio.Event()
    released: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            released.append(request.path)
            return web.Response(status=204)
        if request.path.endswith("/state"):
            return server_state()
        asked.set()
        await answering.wait()
        return lease("a-b")

    async with server(answer) as url:
        async with BrowserClient(url, "") as browsers:
            asking = asyncio.ensure_future(browsers.session().__aenter__())
            await asked.wait()
            asking.cancel()
            answering.set()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert released == ["/v1/leases/a-b"]


async def test_a_step_is_never_sent_twice_and_ends_within_its_timeout() -> None:
    steps = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal steps
        if request.path.endswith("/leases"):
            return lease("a-b")
        if request.path.endswith("/state"):
            return server_state()
        if request.path.endswith("/step"):
            steps += 1
            if steps == 1:
                request.transport.abort()  # type: ignore[union-attr]
            await asyncio.sleep(LIMIT)
        return web.Response(status=204)

    async with server(answer) as url, BrowserClient(url, "") as browsers, browsers.session() as session:
        with pytest.raises(ServerUnreachable):
            await session.step(Action("wait"))
        assert steps == 1
        session._seconds = 0.2
        with pytest.raises(BrowserTimeout, match=r"did not answer POST /v1/leases/a-b/step within 0 s"):
            await session.step(Action("wait"))
        assert steps == 2


def test_outcomes_become_browser_errors() -> None:
    for outcome, kind in (("page_crashed", PageCrashed), ("lightning", BrowserError), (None, BrowserError)):
        body = protocol.dump(protocol.ErrorResponse("the renderer has ended", outcome))
        found = client._failure("http://node7:8700", "/v1/leases/x/step", protocol.STATUS_BROWSER_FAILED, body)
        assert isinstance(found, BrowserError)
        named = outcome or "browser_error"
        assert (type(found), str(found), found.outcome) == (kind, "the renderer has ended", named)
    assert BrowserError.outcome == "browser_error"


@pytest.mark.parametrize("address", ["", "node7:8700", "http://", "ftp://node7", "http://node7/v1", "http://node7:x"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an address such as http://node7:8700 \(browser.servers\)"):
        parse_server_addresses(f"http://fine:1,{address}")


def test_a_client_needs_neither_playwright_nor_torch() -> None:
    code = "import sys, megatron_webrl.browser.server.client; print({'playwright', 'torch', 'vllm'} & set(sys.modules))"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True).stdout == b"set()\n"
