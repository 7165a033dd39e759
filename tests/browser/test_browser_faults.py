"""Browsers that crash, hang, grow or age are replaced, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page

from megatron_webrl.browser import browser_pool as pool_module
from megatron_webrl.browser import chromium as process_module
from megatron_webrl.browser import session as session_module
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.chromium import find_chromium, resident_mib
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserTimeout
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.types import Action, Task
from tests.browser.browser_processes import alive_pids, browser_pids
from tests.browser.conftest import ORIGIN, FolderSite, page_task, pool_on
from tests.waiting import eventually

SECONDS = 60.0  # limit of a test's waits
STORES = """<!DOCTYPE html><title>...</title><script>(async () => {
    const seen = [document.cookie, localStorage.getItem('seen'), sessionStorage.getItem('seen')];
    seen.push((await caches.keys()).join(), (await indexedDB.databases()).map(d => d.name).join());
    seen.push((await navigator.serviceWorker.getRegistrations()).length);
    document.cookie = 'seen=1'; localStorage.setItem('seen', '1'); sessionStorage.setItem('seen', '1');
    await caches.open('seen');
    await new Promise(done => { indexedDB.open('seen').onsuccess = done; });
    navigator.serviceWorker.register('worker.js').catch(() => 0);
    await (await fetch('kept.txt')).text();
    document.title = JSON.stringify(seen);
})();</script>"""


class CountingSite:
    """A site whose server counts requests; `before` may interfere with opening a page."""

    def __init__(self, before: Callable[[Page, int], Awaitable[None]]) -> None:
        self.requests: Counter[str] = Counter()
        self.openings = 0
        self._before = before
        self.server = LocalServer(self._respond, "counting")
        self.origins = frozenset({ORIGIN})
        self.addresses = {"site.localhost": self.server.address}

    def _respond(self, request: PageRequest) -> PageResponse:
        self.requests[request.path] += 1
        kinds = {"html": "text/html", "js": "text/javascript", "txt": "text/plain"}
        kind = kinds[request.path.rpartition(".")[2]]
        body = STORES if kind == "text/html" else ""
        return PageResponse(200, body.encode(), kind, {"Cache-Control": "max-age=3600"})

    def can_reuse_page(self, task: Task) -> bool:
        return task.environment == "stores"

    async def open(self, page: Page, task: Task) -> str:
        self.openings += 1
        await self._before(page, self.openings)
        await page.goto(f"{ORIGIN}/{task.environment}.html")
        await page.wait_for_function("document.title != '...'")
        return ""

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False


@pytest.fixture
def counting() -> Iterator[CountingSite]:
    async def nothing(page: Page, opening: int) -> None:
        pass

    site = CountingSite(nothing)
    yield site
    site.server.close()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def pool_of(site: CountingSite, **settings: int) -> BrowserPool:
    return BrowserPool(BrowserConfig(width=400, height=300, **settings), {"site": site}, 1, 20.0)


async def test_a_cached_session_serves_the_next_episode_of_its_source_with_fresh_counts(counting: CountingSite) -> None:
    async with pool_of(counting, reuse_pages=1) as pool:
        async with pool.episode(page_task("stores")) as (first, seen):
            assert not json.loads(seen.title)[0]
            first.network.count_request()
            await first.step(Action("left_click", coordinate=(500, 500)))
        await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
        assert pool.gauges()["sessions_cached"] == 1
        async with pool.episode(page_task("stores")) as (again, seen):
            assert again is first
            assert json.loads(seen.title)[0] == "seen=1"
            assert (seen.page_changed, pool.gauges()["sessions_cached"]) == (False, 0)
            assert again.network.requests == 0
        async with pool.episode(page_task("other")) as (last, _):
            assert last is first
        async with pool.episode(page_task("other")) as (fresh, _):  # its source does not permit reuse
            assert fresh is not first
        assert (pool.counters.sessions, pool.counters.sessions_reused) == (4, 2)


async def test_lost_or_interrupted_sessions_are_not_cached_and_lost_cached_ones_are_released(
    counting: CountingSite,
) -> None:
    async with pool_of(counting, reuse_pages=2) as pool:
        async with pool.episode(page_task("stores")) as (session, _):
            step = asyncio.ensure_future(session.step(Action("wait", time=5.0)))
            await asyncio.sleep(0)
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
        await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
        assert pool.gauges()["sessions_cached"] == 0
        async with pool.episode(page_task("stores")) as (session, _):
            pass
        assert pool.gauges()["sessions_cached"] == 1
        os.kill(browser_pids("browser")[0], signal.SIGKILL)
        await eventually(lambda: pool.gauges()["sessions_cached"] == 0)
        async with pool.episode(page_task("stores")) as (fresh, _):
            assert fresh is not session
        assert pool.counters.sessions_lost == 0


async def test_the_next_episode_finds_no_state_of_the_previous_one(counting: CountingSite) -> None:
    async with pool_of(counting) as pool:
        for number in (1, 2):
            async with pool.session() as session:
                seen = await session.reset(page_task("stores"))
                assert json.loads(seen.title) == ["", None, None, "", "", 0], number
                seen = await session.reset(page_task("stores"))
                assert json.loads(seen.title) == ["seen=1", "1", "1", "seen", "seen", 0], number
            assert counting.requests["/kept.txt"] == number  # the second page of an episode has it from the cache
        assert pool.counters.launches == 1


async def test_sessions_are_spread_over_browsers_and_a_crash_loses_only_those_of_one(
    site: FolderSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SESSIONS_PER_BROWSER", 2)
    async with pool_on(site, sessions=4) as pool, contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(pool.session()) for _ in range(4)]
        await asyncio.gather(*(session.reset(page_task("first")) for session in sessions))
        assert pool.gauges()["sessions_in_use"] == 4
        os.kill(browser_pids("browser")[0], signal.SIGKILL)
        await eventually(lambda: sum(session.lost.done() for session in sessions) == 2)
        kept = [session for session in sessions if not session.lost.done()]
        seen = await asyncio.gather(*(session.step(Action("wait", time=0)) for session in kept))
        assert [observation.title for observation in seen] == ["First", "First"]
        await eventually(lambda: pool.gauges()["browsers"] == 2)
        assert (pool.counters.crashes, pool.counters.sessions_lost, pool.counters.launches) == (1, 2, 3)


@pytest.mark.parametrize("victim", ["browser", "driver", "renderer"])
async def test_a_killed_process_loses_one_step_and_its_temporary_files_are_removed(
    site: FolderSite, scratch: Path, victim: str
) -> None:
    async with pool_on(site) as pool:
        async with pool.session() as session:
            await session.reset(page_task("first"))
            waiting = asyncio.ensure_future(session.step(Action("wait", time=5)))
            for pid in browser_pids(victim):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(BrowserError) as raised:
                await waiting
        assert raised.value.outcome == ("page_crashed" if victim == "renderer" else "browser_crashed")
        async with pool.episode(page_task("second")) as (_, seen):
            assert seen.title == "Second"
        assert pool.counters.crashes == (victim != "renderer")
        await eventually(lambda: len(list(scratch.iterdir())) == 1)  # the folder of the running browser
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("victim", ["browser", "driver"])
async def test_a_hang_is_detected_by_a_timeout_and_the_browser_is_replaced(
    site: FolderSite, scratch: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setattr(process_module, "PING_SECONDS", 1.0)
    async with pool_on(site) as pool:
        async with pool.session() as session:
            await session.reset(page_task("first"))
            stopped = browser_pids(victim)
            session._step_seconds = 2.0
            os.kill(stopped[0], signal.SIGSTOP)
            with pytest.raises(BrowserTimeout, match="took more than 2"):
                await session.step(Action("wait", time=0))
            await eventually(lambda: pool.counters.hangs == 1)
        async with pool.episode(page_task("second")) as (_, seen):
            assert seen.title == "Second"
        await eventually(lambda: not alive_pids(stopped))
        await eventually(lambda: len(list(scratch.iterdir())) == 1)


async def test_a_hang_is_detected_by_the_health_check(site: FolderSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "PING_SECONDS", 1.0)
    monkeypatch.setattr(pool_module, "HEALTH_CHECK_SECONDS", 0.1)
    async with pool_on(site) as pool, pool.session() as session:
        await session.reset(page_task("first"))
        os.kill(browser_pids("browser")[0], signal.SIGSTOP)
        async with asyncio.timeout(SECONDS):
            assert "does not answer" in str(await session.lost)


# When one script is terminated, the next one starts.
ENDLESS = "() => { for (let n = 0; n < 1000; n++) setTimeout(() => { for (;;); }); }"


async def click_often(session: session_module.Session) -> None:
    """On a busy machine a single step may run between two scripts of an endless page, but not all of these."""
    for _ in range(50):
        await session.step(Action("left_click", coordinate=(900, 900)))  # no link is there


async def test_an_endless_page_loses_only_its_own_session(site: FolderSite) -> None:
    async with pool_on(site, sessions=2) as pool, pool.session() as other:
        await other.reset(page_task("first"))
        async with pool.session() as session:
            await session.reset(page_task("first"))
            before = set(browser_pids("renderer"))
            await session.page.evaluate(ENDLESS)  # the page starts its scripts after the call returns
            session._step_seconds = 2.0
            with pytest.raises(BrowserTimeout):
                await click_often(session)
        await eventually(lambda: before - set(browser_pids("renderer")))
        assert (await other.step(Action("wait", time=0))).title == "First"
        assert (pool.counters.launches, pool.counters.hangs, pool.counters.sessions_lost) == (1, 0, 1)


async def test_a_browser_whose_context_does_not_close_is_replaced(
    site: FolderSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_on(site) as pool:
        old = browser_pids("browser")
        async with pool.session() as session:
            await session.reset(page_task("first"))
            monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.0)
        await eventually(lambda: pool.counters.recycled_by_stuck_contexts == 1)
        monkeypatch.setattr(session_module, "CLOSE_SECONDS", 10.0)
        await eventually(lambda: not alive_pids(old))
        async with pool.episode(page_task("second")) as (_, seen):
            assert seen.title == "Second"


async def test_a_browser_that_has_grown_is_replaced(site: FolderSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "HEALTH_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "RECYCLE_MIB", 5)
    async with pool_on(site, sessions=2) as pool:
        old = browser_pids("browser")
        async with pool.session() as session:
            await session.reset(page_task("first"))
            await eventually(lambda: pool.counters.recycled_by_memory)
            await eventually(lambda: pool.gauges()["browsers_draining"] == 1)
            assert pool.gauges()["resident_mib"] > 10
            assert (await session.step(Action("wait", time=0))).title == "First"
            assert alive_pids(old)
        await eventually(lambda: not alive_pids(old))


@pytest.mark.parametrize("victim", ["browser", "driver", "page"])
async def test_a_reset_that_fails_because_of_the_browser_is_retried(victim: str) -> None:
    async def kill(page: Page, opening: int) -> None:
        if opening == 1 and victim == "page":
            await page.goto("chrome://crash")
        elif opening == 1:
            os.kill(browser_pids(victim)[0], signal.SIGKILL)

    site = CountingSite(kill)
    async with pool_of(site) as pool, pool.episode(page_task("stores")) as (session, seen):
        assert seen.title.startswith("[")
        assert (await session.step(Action("wait", time=0))).title == seen.title
        assert (site.openings, pool.counters.retries) == (2, 1)
    site.server.close()


async def test_a_reset_is_tried_twice_and_raises_the_cause() -> None:
    async def kill(page: Page, opening: int) -> None:
        os.kill(browser_pids("browser")[0], signal.SIGKILL)

    site = CountingSite(kill)
    async with pool_of(site) as pool:
        with pytest.raises(BrowserCrashed, match="Chromium has ended"):
            async with pool.episode(page_task("stores")):
                raise AssertionError("the episode must not begin")
        assert site.openings == 2
        await eventually(lambda: (pool.gauges()["browsers"], pool.gauges()["sessions_in_use"]) == (1, 0))
    site.server.close()


async def test_a_reset_that_fails_because_of_the_site_is_not_retried(counting: CountingSite) -> None:
    counting.server.close()
    async with pool_of(counting) as pool:
        with pytest.raises(BrowserError, match=r"site\.localhost:80 cannot be reached"):
            async with pool.episode(page_task("stores")):
                raise AssertionError("the episode must not begin")
        assert (counting.openings, pool.counters.retries) == (1, 0)


async def test_a_failed_launch_is_reported_and_retried_later(site: FolderSite, tmp_path: Path) -> None:
    broken, script = tmp_path / "broken", tmp_path / "chromium"
    script.write_text(f'#!/bin/sh\n[ -e {broken} ] && exit 1\nexec {find_chromium()} "$@"\n')
    script.chmod(0o755)
    async with pool_on(site, executable=str(script)) as pool:
        broken.touch()
        os.kill(browser_pids("browser")[0], signal.SIGKILL)
        await eventually(lambda: pool.counters.failed_launches >= 1)
        with pytest.raises(BrowserCrashed, match="chromium does not start"):
            await pool.episode(page_task("first")).__aenter__()
        broken.unlink()
        async with pool.episode(page_task("second")) as (_, seen):
            assert seen.title == "Second"


async def test_a_session_of_a_cancelled_caller_is_released(site: FolderSite) -> None:
    async with pool_on(site) as pool:
        for _ in range(3):
            taking = asyncio.ensure_future(pool._acquire())
            await asyncio.sleep(0)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
        async with pool.episode(page_task("first")) as (_, seen):
            assert seen.title == "First"
        await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)


def test_resident_memory_counts_private_memory_and_shares_of_shared_memory() -> None:
    code = "import time; held = bytearray(64 << 20); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert 64 < resident_mib([holder.pid]) < 64 + 40
        holder.kill()
        holder.wait()
        assert resident_mib([holder.pid]) == 0


OWNER = """
import asyncio, sys
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.config.browser import BrowserConfig

async def main():
    async with BrowserPool(BrowserConfig(), {}, 1):
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_next_pool_removes_leftovers_of_a_killed_process(site: FolderSite, scratch: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        assert (await asyncio.to_thread(owner.stdout.readline)) == b"up\n"
        orphans = browser_pids("browser", parent_pid=owner.pid)
        os.kill(orphans[0], signal.SIGSTOP)  # so that it does not notice the end of its driver
        for pid in [owner.pid, *browser_pids("driver", parent_pid=owner.pid)]:
            os.kill(pid, signal.SIGKILL)
    try:
        assert alive_pids(orphans)
        assert list(scratch.iterdir())
        async with pool_on(site):
            assert not alive_pids(orphans)
            assert [folder.name.split("-")[1] for folder in scratch.iterdir()] == [str(os.getpid())]
        assert not list(scratch.iterdir())
    finally:
        for pid in alive_pids(orphans):  # that the pool did not kill
            os.kill(pid, signal.SIGKILL)
