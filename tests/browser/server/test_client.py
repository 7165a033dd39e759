"""The client against real browser servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from megatron_webrl.browser.errors import BrowserCrashed
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.client import BrowserBusy, BrowserClient, LeaseLost, RemoteSession, ServerUnreachable
from megatron_webrl.browser.server.local_servers import LocalServers, local_servers
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.types import Action
from tests.browser.server.servers import LIMIT, browser_of, click_task, config_for, server_at, server_processes, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[LocalServers]:
    """Two servers with two sessions each."""
    async with local_servers(config_for(processes=2), sessions=4) as servers:
        yield servers


@asynccontextmanager
async def client(servers: LocalServers, **settings: object) -> AsyncIterator[BrowserClient]:
    async with BrowserClient(servers.poll_addresses, servers.token, wait_seconds=LIMIT, **settings) as browsers:  # type: ignore[arg-type]
        yield browsers


async def free(browsers: BrowserClient, servers: LocalServers) -> int:
    return sum([(await browsers.server_state(url)).free for url in servers.addresses()])


async def test_a_task_is_reset_demonstrated_and_solved(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        seen = await session.reset(click_task())
        assert seen.instruction == "Click the button."
        assert seen.screenshot.startswith(b"\x89PNG")
        assert session.task == click_task()
        seen = await session.step(await session.demonstration())
        assert (seen.done, seen.reward is not None and seen.reward > 0.9) == (True, True)


async def test_a_reset_by_environment_and_seed_returns_the_task(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        await session.reset(protocol.ResetRequest(source="sites", environment="wiki-look-up", seed=5))
        assert session.task is not None
        assert (session.task.id, session.task.answer is not None) == ("sites/wiki-look-up/5", True)


async def test_an_invalid_request_is_a_value_error_and_the_session_continues(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        with pytest.raises(ValueError, match="reset begins one"):
            await session.step(Action("wait", time=0))
        with pytest.raises(ValueError, match=r"click-tset.*near: click-test"):
            await session.reset(click_task("click-tset"))
        await session.reset(click_task())
        with pytest.raises(ValueError, match="lacks what its kind needs"):
            await session.step(Action("left_click"))
        assert (
            await session.step(Action("hover", coordinate=(1, 1)))
        ).error == "hover is not enabled (browser.actions)"


async def test_an_environment_without_a_scripted_policy_is_an_error(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        await session.reset(click_task("book-flight"))
        with pytest.raises(ScriptedPolicyError, match="book-flight"):
            await session.demonstration()


async def test_a_response_does_not_wait_for_acknowledgement_of_its_headers(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        seconds = []
        for _ in range(30):
            begun = time.monotonic()
            await session.lease_state()
            seconds.append(time.monotonic() - begun)
    assert min(seconds) < 0.03  # each would take 0.04 at least, on any machine


async def test_sessions_are_balanced_over_the_servers(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as a, browsers.session() as b:
        assert {a.address, b.address} == set(servers.addresses())
        async with browsers.session() as c, browsers.session() as d:
            assert sorted(s.address for s in (a, b, c, d)) == sorted(servers.addresses() * 2)
            assert await free(browsers, servers) == 0
        assert await free(browsers, servers) == 2


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


async def test_an_idle_lease_is_renewed(servers: LocalServers) -> None:
    async with client(servers, lease_seconds=2.0) as browsers, browsers.session() as session:
        await session.reset(click_task())
        done = time.monotonic()
        await until(lambda: session._last_contact > done + session.lease.seconds, "renewed beyond its first lifetime")
        assert (await session.step(Action("wait", time=0))).error is None


async def test_a_lost_lease_is_named_and_a_reset_takes_another(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        await session.reset(click_task())
        lost = session.lease.id
        await browsers.release_lease(session.lease, session.address)
        with pytest.raises(LeaseLost, match="released"):
            await session.step(Action("wait", time=0))
        assert (await session.reset(click_task())).instruction == "Click the button."
        assert session.lease.id != lost


async def test_a_lease_released_during_a_step_is_lost_to_the_step(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as session:
        await session.reset(click_task())
        waiting = asyncio.ensure_future(session.step(Action("wait", time=5)))
        while (await session.lease_state()).state != "acting":
            await asyncio.sleep(0.02)
        await browsers.release_lease(session.lease, session.address)
        with pytest.raises(LeaseLost, match="released"):
            await waiting


async def test_a_killed_browser_fails_its_sessions_and_the_next_ones_work(servers: LocalServers) -> None:
    async with client(servers) as browsers:
        async with browsers.session() as session, browsers.session() as other:
            await asyncio.gather(session.reset(click_task()), other.reset(click_task()))
            waiting = [asyncio.ensure_future(each.step(Action("wait", time=5))) for each in (session, other)]
            for server in server_processes():
                browser_of(server).kill()
            for each in waiting:
                with pytest.raises(BrowserCrashed, match="Chromium has ended"):
                    await each
        async with browsers.session() as session:
            assert (await session.reset(click_task())).instruction == "Click the button."


async def test_a_dead_server_fails_fast_and_the_next_session_is_elsewhere(servers: LocalServers) -> None:
    async with client(servers) as browsers, browsers.session() as first, browsers.session() as second:
        await asyncio.gather(first.reset(click_task()), second.reset(click_task()))
        waiting = asyncio.ensure_future(first.step(Action("wait", time=5)))
        await until(lambda: not waiting.done(), "the step has begun")
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


async def test_a_wrong_token_is_refused_with_the_name_of_its_variable(servers: LocalServers) -> None:
    async with BrowserClient(servers.poll_addresses, "not the token") as browsers:
        with pytest.raises(ConfigError, match=r"refuses the token; set WEBRL_BROWSERS_TOKEN"):
            await browsers.wait_until_ready(LIMIT)
        with pytest.raises(ConfigError, match=r"refuses the token"):
            async with browsers.session():
                raise AssertionError("there is no place")


async def test_a_server_with_another_session_spec_is_refused(servers: LocalServers) -> None:
    view = protocol.SessionSpec.from_config(BrowserConfig(width=320, height=210, screenshot="png", marks=True))
    message = r"has browser.width=160 instead of 320, browser.marks=False instead of True; start it with"
    async with client(servers, spec=view) as browsers:
        with pytest.raises(ConfigError, match=message):
            await browsers.wait_until_ready(LIMIT)
        with pytest.raises(ConfigError, match=message):
            async with browsers.session():
                raise AssertionError("there is no place")
    async with client(servers, spec=protocol.SessionSpec.from_config(config_for().browser)) as browsers:
        await browsers.wait_until_ready(LIMIT)
        assert await free(browsers, servers) == 4
