"""The client against real browser servers, and busy, silent and unreachable ones; the life of local servers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from aiohttp import web

from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.server import client as client_module
from megatron_webrl.browser.server import local_servers as local_servers_module
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.client import BrowserBusy, BrowserClient, LeaseLost, RemoteSession, ServerUnreachable
from megatron_webrl.browser.server.local_servers import LocalServers, local_servers
from megatron_webrl.config.browser import BrowserConfig, parse_server_addresses
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import ProcessError, is_alive, start_time
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.types import Action, Observation
from tests.browser.server.servers import LIMIT, click_task, config_for, server_processes
from tests.judge.support import serving
from tests.waiting import eventually, started

pytestmark = pytest.mark.asyncio(loop_scope="module")


def below(process: psutil.Process) -> list[tuple[int, int]]:
    return [(each.pid, start_time(each.pid)) for each in [process, *process.children(recursive=True)]]


def running(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [process for process in found if is_alive(*process)]


@pytest.mark.slow
async def test_a_server_that_fails_too_often_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_servers_module, "MAX_RESTARTS", 0)
    async with (
        local_servers(config_for(), 1) as servers,
        BrowserClient(servers.poll_addresses, servers.token, wait_seconds=60) as browsers,
    ):
        server_processes()[0].kill()
        with pytest.raises(ProcessError, match=r"browsers-0 killed by SIGKILL; last log line: .*, after 0 restarts"):
            async with browsers.session():
                raise AssertionError("there is no place")


async def test_a_server_that_cannot_start_or_is_not_of_the_main_thread_is_an_error() -> None:
    with pytest.raises(ProcessError, match=r"browsers-0 exited with code 1; last log line: .*/bin/true does not start"):
        async with local_servers(config_for(executable="/bin/true"), 1):
            raise AssertionError("it is not up")
    assert not server_processes()
    servers = LocalServers(config_for(), 1)
    with pytest.raises(ProcessError, match="must be started from the main thread"):
        await asyncio.to_thread(servers.start)
    servers.close()


@pytest.mark.slow
async def test_servers_and_browsers_end_with_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import asyncio
from megatron_webrl.browser.server.local_servers import local_servers
from tests.browser.server.servers import config_for

async def main():
    async with local_servers(config_for(processes=2), 2):
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    root, environment = Path(__file__).parents[3], {**os.environ, "TMPDIR": str(tmp_path)}
    with started([sys.executable, "-c", code], cwd=root, env=environment) as parent:
        assert parent.stdout is not None
        assert await asyncio.wait_for(asyncio.to_thread(parent.stdout.readline), 2 * LIMIT) == "ready\n"
        found = below(psutil.Process(parent.pid))
    assert len(found) > 6  # servers, drivers, Chromium
    try:
        await eventually(lambda: not running(found))
    finally:
        for pid, _ in running(found):
            os.kill(pid, signal.SIGKILL)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(child_process.sweep_scratch()) == 1
    assert not list(tmp_path.iterdir())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(scratch: Path) -> AsyncIterator[LocalServers]:
    """Two servers with two sessions each. The last test closes them."""
    async with local_servers(config_for(processes=2), 4, scratch / "logs", "mine") as servers:
        yield servers


@asynccontextmanager
async def client(servers: LocalServers, **settings: object) -> AsyncIterator[BrowserClient]:
    async with BrowserClient(servers.poll_addresses, servers.token, wait_seconds=LIMIT, **settings) as browsers:  # type: ignore[arg-type]
        yield browsers


async def free(browsers: BrowserClient, servers: LocalServers) -> int:
    return sum([(await browsers.server_state(url)).free for url in servers.addresses()])


def server_at(address: str) -> psutil.Process:
    port = int(address.rpartition(":")[2])
    for process in server_processes():
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp")):
            return process
    raise AssertionError(f"none of our servers listens at {address}")


async def test_a_waiting_caller_gets_the_next_free_session(servers: LocalServers) -> None:
    leased, release = asyncio.Event(), asyncio.Event()

    async def hold(browsers: BrowserClient) -> None:
        async with browsers.session():
            leased.set()
            await release.wait()

    async with client(servers) as browsers, browsers.session(), browsers.session(), browsers.session():
        holding = asyncio.ensure_future(hold(browsers))
        await leased.wait()
        waiting = asyncio.ensure_future(browsers.session().__aenter__())
        async with BrowserClient(servers.poll_addresses, servers.token, wait_seconds=0.3) as impatient:
            with pytest.raises(BrowserBusy, match=r"no browser within 0 s; waited for http://127\.0\.0\.1:\d+, http"):
                async with impatient.session():
                    raise AssertionError("there is no place")
        assert not waiting.done()
        release.set()
        session = await waiting
        assert isinstance(session, RemoteSession)
        await session.close()
        await holding


async def test_a_session_resets_demonstrates_and_names_invalid_requests(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        with pytest.raises(ValueError, match=r"click-tset.*near: click-test"):
            await session.reset(click_task("click-tset"))
        await session.reset(click_task())
        assert session.task == click_task()
        with pytest.raises(ValueError, match="lacks what its kind needs"):
            await session.step(Action("left_click"))
        seen = await session.step(await session.demonstration())
        assert (seen.done, seen.reward is not None and seen.reward > 0.9) == (True, True)
        await session.reset(protocol.ResetRequest(source="sites", environment="wiki-look-up", seed=5))
        assert session.task is not None
        assert (session.task.id, session.task.answer is not None) == ("sites/wiki-look-up/5", True)
        await session.reset(click_task("book-flight"))
        with pytest.raises(ScriptedPolicyError, match="book-flight"):
            await session.demonstration()
        seconds = []
        for _ in range(30):
            begun = time.monotonic()
            await session.lease_state()
            seconds.append(time.monotonic() - begun)
        assert min(seconds) < 0.03  # 0.04 at least, if a response waited for acknowledgement of its headers


async def test_an_idle_lease_is_renewed(servers: LocalServers) -> None:
    async with client(servers, lease_seconds=1.0) as browsers, browsers.session() as session:
        await session.reset(click_task())
        done = time.monotonic()
        await eventually(lambda: session._last_contact > done + session.lease.seconds)
        assert (await session.step(Action("wait", time=0))).error is None


async def test_a_lost_lease_is_named_and_a_reset_takes_another(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        for during_a_step in (True, False):
            await session.reset(click_task())
            lost, step = session.lease.id, None
            if during_a_step:
                step = asyncio.ensure_future(session.step(Action("wait", time=5)))
                while (await session.lease_state()).state != "acting":
                    await asyncio.sleep(0.02)
            await browsers.release_lease(session.lease, session.address)
            with pytest.raises(LeaseLost, match="released"):
                await (step or session.step(Action("wait", time=0)))
        assert (await session.reset(click_task())).instruction == "Click the button."
        assert session.lease.id != lost


async def test_a_dead_server_fails_fast_and_the_next_session_is_elsewhere(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as first, browsers.session() as second:
        await asyncio.gather(first.reset(click_task()), second.reset(click_task()))
        waiting = asyncio.ensure_future(first.step(Action("wait", time=5)))
        await eventually(lambda: not waiting.done())
        begun = time.monotonic()
        server_at(first.address).kill()
        with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:\d+ cannot be reached"):
            await waiting
        assert time.monotonic() - begun < 20  # the step itself may take longer
        assert (await second.step(Action("wait", time=0))).error is None
        # The session restarts on the other server, or on the same one after its restart.
        assert (await first.reset(click_task())).instruction == "Click the button."
        await servers.wait_until_ready()
        assert await free(browsers, servers) == 2


async def test_a_wrong_token_and_another_session_spec_are_refused(servers: LocalServers) -> None:
    view = protocol.SessionSpec.from_config(BrowserConfig(width=320, height=210, screenshot="png", marks=True))
    same = protocol.SessionSpec.from_config(config_for().browser)
    spec = r"has browser.width=160 instead of 320, browser.marks=False instead of True; start it with"
    for token, wanted, message in (
        ("not the token", same, r"refuses the token; set WEBRL_BROWSERS_TOKEN"), (servers.token, view, spec),
    ):  # fmt: skip
        async with BrowserClient(servers.poll_addresses, token, spec=wanted) as browsers:
            with pytest.raises(ConfigError, match=message):
                await browsers.wait_until_ready(LIMIT)
            with pytest.raises(ConfigError, match=message):
                await browsers.acquire_lease()
    async with client(servers, spec=same) as browsers:
        await browsers.wait_until_ready(LIMIT)
        assert await free(browsers, servers) == 4


async def test_closing_leaves_no_process_file_or_shared_memory(servers: LocalServers, scratch: Path) -> None:
    found = [process for server in server_processes() for process in below(server)]
    assert len(found) > 6  # servers, drivers, Chromium
    await asyncio.to_thread(servers.close)
    assert not running(found)
    assert [path.name for path in scratch.iterdir()] == ["logs"]
    assert sorted(path.name for path in (scratch / "logs").iterdir()) == ["mine-0.log", "mine-1.log"]
    assert not [name for name in os.listdir("/dev/shm") if "chrom" in name.lower()]


async def test_a_reward_that_is_no_number_stays_so() -> None:
    """It must not become a missing one, which does not mask the episode."""
    for reward in (float("nan"), float("inf"), 0.5, None):
        seen = Observation(b"x", "", "", False, reward=reward)
        assert repr(protocol.decode_observation(protocol.encode_observation(seen)).reward) == repr(reward)


@asynccontextmanager
async def fake_server(
    sessions: int = 1, before: Callable[[web.Request], Awaitable[None]] | None = None
) -> AsyncIterator[str]:
    """A server that only leases; `before` sees each request first."""
    free = sessions

    async def answer(request: web.Request) -> web.Response:
        nonlocal free
        if before is not None:
            await before(request)
        if request.path.endswith("/state"):
            state = protocol.ServerState(free, free, protocol.SessionSpec.from_config(BrowserConfig()))
            return web.Response(body=protocol.dump(state))
        if request.path.endswith("/leases"):
            if not free:
                return web.Response(status=503, text='{"error": "full"}')
            free -= 1
            return web.Response(status=201, body=protocol.dump(protocol.Lease("a-b", 60.0, free)))
        free += request.method == "DELETE"
        return web.Response(status=204)

    async with serving(answer) as url:
        yield url.removesuffix("/v1")


async def test_leases_go_to_the_server_with_the_most_free_sessions() -> None:
    asked = Counter[str]()

    async def count(request: web.Request) -> None:
        asked[request.path] += 1

    async with fake_server(4, count) as large, fake_server(2, count) as small:
        async with BrowserClient(f"{small},{large}", "", wait_seconds=5.0) as browsers, AsyncExitStack() as stack:
            await browsers.wait_until_ready(LIMIT)
            used = [(await stack.enter_async_context(browsers.session())).address for _ in range(6)]
            assert used[:2] == [large] * 2  # of 4 and 2, then of 3 and 2
            assert Counter(used) == {large: 4, small: 2}
            assert asked["/v1/leases"] == 6  # no server is asked in vain
        async with BrowserClient(f"{small},{large}", "") as browsers, AsyncExitStack() as stack:
            many = [stack.enter_async_context(browsers.session()) for _ in range(6)]
            assert Counter([each.address for each in await asyncio.gather(*many)]) == {large: 4, small: 2}


async def test_a_server_that_is_away_or_silent_is_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_SECONDS", 0.4)
    monkeypatch.setattr(client_module, "AWAY_SECONDS", 0.8)
    asked: list[float] = []

    async def say_nothing(request: web.Request) -> None:
        asked.append(time.monotonic())
        await asyncio.sleep(LIMIT)

    async with (
        fake_server(1, say_nothing) as mute,
        fake_server(99) as well,
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
    assert asked[1] - asked[0] > 1.1  # the timeout and the time of absence


async def test_a_lease_granted_to_a_cancelled_caller_is_released() -> None:
    asked, answering = asyncio.Event(), asyncio.Event()
    released: list[str] = []

    async def before(request: web.Request) -> None:
        if request.method == "DELETE":
            released.append(request.path)
        elif request.method == "POST":
            asked.set()
            await answering.wait()

    async with fake_server(1, before) as url:
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

    async def before(request: web.Request) -> None:
        nonlocal steps
        if request.path.endswith("/step"):
            steps += 1
            if steps == 1:
                request.transport.abort()  # type: ignore[union-attr]
            await asyncio.sleep(LIMIT)

    async with fake_server(1, before) as url, BrowserClient(url, "") as browsers, browsers.session() as session:
        with pytest.raises(ServerUnreachable):
            await session.step(Action("wait"))
        assert steps == 1
        session._seconds = 0.2
        with pytest.raises(BrowserTimeout, match=r"did not answer POST /v1/leases/a-b/step within 0 s"):
            await session.step(Action("wait"))
        assert steps == 2


async def test_outcomes_become_browser_errors() -> None:
    for outcome, kind in (
        ("page_crashed", PageCrashed), ("browser_crashed", BrowserCrashed), ("browser_timeout", BrowserTimeout),
        ("lightning", BrowserError), (None, BrowserError),
    ):  # fmt: skip
        body = protocol.dump(protocol.ErrorResponse("the renderer has ended", outcome))
        found = client_module._failure("http://node7:8700", "/v1/leases/x/step", protocol.STATUS_BROWSER_FAILED, body)
        assert isinstance(found, BrowserError)
        named = outcome or "browser_error"
        assert (type(found), str(found), found.outcome) == (kind, "the renderer has ended", named)
    assert BrowserError.outcome == "browser_error"


async def test_an_unreachable_server_and_an_invalid_address_are_named() -> None:
    async with BrowserClient("http://127.0.0.1:9", "") as browsers:
        with pytest.raises(ServerUnreachable, match=r"within 0 s: http://127.0.0.1:9 cannot be reached"):
            await browsers.wait_until_ready(0.2)
    for address in ("", "node7:8700", "http://", "ftp://node7", "http://node7/v1", "http://node7:x"):
        with pytest.raises(ConfigError, match=r"is not an address such as http://node7:8700 \(browser.servers\)"):
            parse_server_addresses(f"http://fine:1,{address}")
