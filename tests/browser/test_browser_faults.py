"""Browsers start with a clean state; those that crash, hang, grow or age are replaced, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from playwright.async_api import Page

from megatron_webrl.browser import browser_pool as pool_module
from megatron_webrl.browser import chromium as process_module
from megatron_webrl.browser import session as session_module
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.chromium import find_chromium, resident_mib
from megatron_webrl.browser.errors import BrowserCrashed, BrowserError, BrowserMissing, BrowserTimeout, PageCrashed
from megatron_webrl.config.browser import BrowserConfig, check_browser_user
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.types import Action, Task
from tests.browser.browser_processes import alive_pids, browser_pids
from tests.browser.conftest import ORIGIN, PAGES, FolderSite, page_task, pool_on
from tests.browser.egress.proxy_client import OK, Server, answering
from tests.waiting import eventually, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT = Action("wait", time=0)
CANARY = "canary-7f3a"
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


GONE = "http://gone.localhost"  # nothing listens there


class CountingSite:
    """Counts requests and openings of pages; `before` may interfere with opening one."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.openings = 0
        self.before: Callable[[Page, int], Awaitable[object]] | None = None
        self.server = LocalServer(self._respond, "counting")
        self.origins = frozenset({ORIGIN, GONE})
        self.addresses = {"site.localhost": self.server.address, "gone.localhost": "127.0.0.1:9"}

    def _respond(self, request: PageRequest) -> PageResponse:
        self.requests[request.path] += 1
        name, _, ending = request.path[1:].partition(".")
        kind = {"html": "text/html", "js": "text/javascript", "txt": "text/plain"}[ending]
        body = PAGES.get(name, STORES) if ending == "html" else ""
        return PageResponse(200, body.encode(), kind, {"Cache-Control": "max-age=3600"})

    def can_reuse_page(self, task: Task) -> bool:
        return task.environment == "stores"

    async def open(self, page: Page, task: Task) -> str:
        self.openings += 1
        if self.before is not None:
            await self.before(page, self.openings)
        await page.goto(f"{ORIGIN}/{task.environment}.html")
        await page.wait_for_function("document.title != '...'")
        return ""

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False


@pytest.fixture(scope="module")
def counting() -> Iterator[CountingSite]:
    site = CountingSite()
    yield site
    site.server.close()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists the `chromium` beside it does not start."""
    return tmp_path_factory.mktemp("launcher") / "broken"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pool(counting: CountingSite, scratch: Path, broken: Path) -> AsyncIterator[BrowserPool]:
    """A pool of one browser in a process that has keys and tokens."""
    script = broken.with_name("chromium")
    script.write_text(f'#!/bin/sh\n[ -e {broken} ] && exit 1\nexec {find_chromium()} "$@"\n')
    script.chmod(0o755)
    for name in ("GEMINI_API_KEY", "WEBRL_BROWSERS_TOKEN", "WEBRL_BROWSERS_SERVER_TOKEN", "https_proxy"):
        os.environ[name] = CANARY
    (scratch / f"webrl-999999999-1-{child_process._machine()}-x").mkdir()  # of a killed process: the pool removes it
    settings = BrowserConfig(width=400, height=300, reuse_pages=1, executable=str(script))
    async with BrowserPool(settings, {"site": counting}, 2, 20.0) as pool:
        yield pool
    assert not list(scratch.iterdir())


@pytest_asyncio.fixture(loop_scope="module")
async def pool(one_pool: BrowserPool, counting: CountingSite, scratch: Path) -> AsyncIterator[BrowserPool]:
    """The pool of this file, with counters of its own. Nothing is left of a browser that a test kills."""
    one_pool.counters, counting.openings, counting.before = pool_module.BrowserPoolCounters(), 0, None
    counting.requests.clear()
    yield one_pool
    await eventually(lambda: one_pool.gauges()["browsers"] == len(list(scratch.iterdir())) == 1)
    running = [pid for kind in ("driver", "browser") for pid in browser_pids(kind)]
    assert set(running) == {*pids_of(one_pool, "driver"), *pids_of(one_pool, "browser")}


def pids_of(pool: BrowserPool, kind: str) -> list[int]:
    """Processes of the first browser of a pool: its driver, its main process, or its renderers."""
    browser = pool.browsers[0].chromium.pid
    if kind == "driver":
        return [psutil.Process(os.getpgid(browser)).ppid()]
    return [browser] if kind == "browser" else browser_pids(kind, browser)


def send(pool: BrowserPool, number: signal.Signals, kind: str = "browser") -> list[int]:
    for pid in (pids := pids_of(pool, kind)):
        os.kill(pid, number)
    return pids


async def serves(pool: BrowserPool) -> bool:
    async with pool.episode(page_task("second")) as (_, seen):
        return seen.title == "Second"


async def test_chromium_is_found_or_its_package_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def install(path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
        return str(path)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "shared"))
    with pytest.raises(BrowserMissing, match="install Debian's package chromium-headless-shell"):
        find_chromium()
    with pytest.raises(BrowserMissing, match=r"browser\.executable=netscape is not an executable file"):
        find_chromium("netscape")
    build = "chrome-headless-shell-linux64/chrome-headless-shell"
    cache = install(tmp_path / ".cache/ms-playwright/chromium_headless_shell-1200" / build)
    assert find_chromium() == cache
    for name in ("google-chrome", "chromium", "chromium-headless-shell"):
        assert find_chromium() != (path := install(tmp_path / "bin" / name))
        assert find_chromium() == path  # before Playwright's default folder
    newest = install(tmp_path / "shared/chromium_headless_shell-1200" / build)
    install(tmp_path / "shared/chromium_headless_shell-999" / build)  # the older revision
    assert find_chromium() == newest


async def test_no_process_of_a_browser_has_the_keys_and_tokens_of_its_parent(pool: BrowserPool) -> None:
    """Without Chromium's sandbox, as for root, a page that takes over its renderer reads the environment."""
    async with pool.session():
        driver, found = psutil.Process(pids_of(pool, "driver")[0]), []
        for process in (driver, *driver.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                found.append(process.environ())
    browsers = [environment for environment in found if "PATH" in environment]  # renderers overwrite theirs
    assert len(browsers) > 2
    assert {environment["TZ"] for environment in browsers} == {"UTC"}
    assert CANARY not in str(found)


async def test_a_failed_launch_is_reported_and_retried_later(pool: BrowserPool, broken: Path) -> None:
    broken.touch()
    send(pool, signal.SIGKILL)
    await eventually(lambda: pool.gauges()["browsers"] == 0)
    with pytest.raises(BrowserCrashed, match="chromium does not start"):
        await pool.episode(page_task("first")).__aenter__()
    assert pool.counters.failed_launches >= 1
    broken.unlink()
    assert await serves(pool)


async def test_a_cached_session_serves_the_next_episode_unless_it_was_lost_or_interrupted(pool: BrowserPool) -> None:
    async with pool.episode(page_task("stores")) as (first, seen):
        assert not json.loads(seen.title)[0]
        first.network.count_request()
        first.network.count_bytes(2**20)
        await first.step(Action("left_click", coordinate=(500, 500)))
    await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
    assert pool.gauges()["sessions_cached"] == 1
    async with pool.episode(page_task("stores")) as (again, seen):
        assert again is first
        assert json.loads(seen.title)[0] == "seen=1"
        assert (seen.page_changed, pool.gauges()["sessions_cached"]) == (False, 0)
        assert again.network.requests == 0
        assert again.network.bytes < 2**20
    async with pool.episode(page_task("other")) as (last, _):
        assert last is first
    async with pool.episode(page_task("other")) as (fresh, _):  # its source does not permit reuse
        assert fresh is not first
    assert (pool.counters.sessions, pool.counters.sessions_reused) == (4, 2)
    async with pool.episode(page_task("stores")), pool.episode(page_task("stores")):
        pass
    await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
    assert pool.gauges()["sessions_cached"] == 1  # browser.reuse_pages
    async with pool.episode(page_task("stores")) as (session, _):
        step = asyncio.ensure_future(session.step(Action("wait", time=5.0)))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
    await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
    assert pool.gauges()["sessions_cached"] == 0  # it was interrupted
    async with pool.episode(page_task("stores")) as (session, _):
        pass
    assert pool.gauges()["sessions_cached"] == 1
    send(pool, signal.SIGKILL)
    await eventually(lambda: pool.gauges()["sessions_cached"] == 0)
    async with pool.episode(page_task("other")) as (fresh, _):
        assert fresh is not session
    assert pool.counters.sessions_lost == 0


async def test_the_next_episode_finds_no_state_of_the_previous_one(pool: BrowserPool, counting: CountingSite) -> None:
    for number in (1, 2):
        async with pool.session() as session:
            seen = await session.reset(page_task("stores"))
            assert json.loads(seen.title) == ["", None, None, "", "", 0], number
            seen = await session.reset(page_task("stores"))
            assert json.loads(seen.title) == ["seen=1", "1", "1", "seen", "seen", 0], number
        assert counting.requests["/kept.txt"] == number  # the second page of an episode has it from the cache
    await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
    with pytest.raises(ConnectionError):  # its way out is closed
        await asyncio.open_connection("127.0.0.1", session.network.port)
    for _ in range(3):  # a session of a cancelled caller is released
        taking = asyncio.ensure_future(pool._acquire())
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
    await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
    assert pool.counters.launches == 0


async def test_a_crash_loses_the_sessions_of_one_browser(site: FolderSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SESSIONS_PER_BROWSER", 1)
    async with pool_on(site, sessions=2) as pool, contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(pool.session()) for _ in range(2)]
        await asyncio.gather(*(session.reset(page_task("first")) for session in sessions))
        third = asyncio.ensure_future(stack.enter_async_context(pool.session()))
        assert not (await asyncio.wait({third}, timeout=0.3))[0]
        assert pool.gauges()["sessions_in_use"] == 2
        third.cancel()
        send(pool, signal.SIGKILL)
        await eventually(lambda: any(session.lost.done() for session in sessions))
        [crashed] = [session for session in sessions if session.lost.done()]
        [kept] = {*sessions} - {crashed}
        assert crashed.lost.result().outcome == "browser_crashed"
        assert (await kept.step(WAIT)).title == "First"
        await eventually(lambda: pool.gauges()["browsers"] == 2)
        assert (pool.counters.crashes, pool.counters.sessions_lost, pool.counters.launches) == (1, 1, 3)
        await stack.aclose()
        await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
        monkeypatch.setattr(process_module, "CLOSE_SECONDS", 1.0)
        stopped, closing = send(pool, signal.SIGSTOP), time.monotonic()
    assert time.monotonic() - closing < 20
    await eventually(lambda: not alive_pids(stopped), 10)


@pytest.mark.parametrize("victim", ["driver", "renderer", pytest.param("browser", marks=pytest.mark.slow)])
async def test_a_killed_process_loses_one_step(pool: BrowserPool, victim: str) -> None:
    async with pool.session() as session:
        await session.reset(page_task("first"))
        waiting, started_at = asyncio.ensure_future(session.step(Action("wait", time=5))), time.monotonic()
        send(pool, signal.SIGKILL, victim)
        with pytest.raises(BrowserError) as raised:
            await waiting
    assert time.monotonic() - started_at < 4  # the step would have taken longer
    assert raised.value.outcome == ("page_crashed" if victim == "renderer" else "browser_crashed")
    assert await serves(pool)
    assert pool.counters.crashes == (victim != "renderer")


@pytest.mark.parametrize("victim", ["browser", pytest.param("driver", marks=pytest.mark.slow)])
async def test_a_hanging_browser_is_replaced(pool: BrowserPool, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """Whichever limit ends first is reported, that of the step or that of two pings: here that of the step, for sure.

    The other order is in test_a_browser_that_has_grown_or_hangs_is_replaced.
    """
    monkeypatch.setattr(process_module, "PING_SECONDS", 2.0)  # a health check may be the first to ping
    monkeypatch.setattr(pool_module, "ANSWER_SECONDS", 0.3)
    async with pool.session() as session:
        await session.reset(page_task("first"))
        session._step_seconds = 1.0
        stopped = send(pool, signal.SIGSTOP, victim)
        assert await pool.health_problem() == "no browser answered within 0.3 s"
        with pytest.raises(BrowserTimeout, match=r"wait took more than 1.0 s \(rollout.operation_timeout_seconds\)"):
            await session.step(WAIT)
        await eventually(lambda: pool.counters.hangs == 1)
    assert await serves(pool)
    await eventually(lambda: not alive_pids(stopped))
    monkeypatch.setattr(pool_module, "ANSWER_SECONDS", 5.0)
    assert await pool.health_problem() is None


async def test_a_browser_that_answers_late_once_is_kept(pool: BrowserPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "PING_SECONDS", 1.0)
    send(pool, signal.SIGSTOP)
    health = asyncio.create_task(pool.health_problem())
    await asyncio.sleep(1.1)  # more than one ping, less than two
    send(pool, signal.SIGCONT)
    assert await health is None
    assert pool.counters.hangs == 0


async def test_a_browser_that_has_grown_or_hangs_is_replaced(site: FolderSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "HEALTH_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "RECYCLE_MIB", 5)
    async with pool_on(site, sessions=2) as pool:
        old = pids_of(pool, "browser")
        async with pool.session() as session:
            await session.reset(page_task("first"))
            await eventually(lambda: pool.counters.recycled_by_memory)
            await eventually(lambda: pool.gauges()["browsers_draining"] == 1)
            assert pool.gauges()["resident_mib"] > 10
            assert (await session.step(WAIT)).title == "First"
            assert alive_pids(old)
        await eventually(lambda: not alive_pids(old))
        monkeypatch.setattr(pool_module, "RECYCLE_MIB", 6144)
        monkeypatch.setattr(process_module, "PING_SECONDS", 0.5)
        async with pool.session() as session:
            send(pool, signal.SIGSTOP)
            await eventually(session.lost.done)
            assert "does not answer" in str(session.lost.result())


# When one script is terminated, the next one starts.
ENDLESS = "() => { for (let n = 0; n < 1000; n++) setTimeout(() => { for (;;); }); }"


async def click_often(session: session_module.Session) -> None:
    """On a busy machine a single step may run between two scripts of an endless page, but not all of these."""
    for _ in range(50):
        await session.step(Action("left_click", coordinate=(900, 900)))  # no link is there


async def test_an_endless_page_loses_only_its_own_session(pool: BrowserPool) -> None:
    async with pool.session() as other:
        await other.reset(page_task("first"))
        async with pool.session() as session:
            await session.reset(page_task("first"))
            before = set(browser_pids("renderer"))
            await session.page.evaluate(ENDLESS)  # the page starts its scripts after the call returns
            session._step_seconds = 2.0
            with pytest.raises(BrowserTimeout):
                await click_often(session)
        await eventually(lambda: before - set(browser_pids("renderer")))
        assert (await other.step(WAIT)).title == "First"
        assert (pool.counters.launches, pool.counters.hangs, pool.counters.sessions_lost) == (0, 0, 1)


async def test_a_browser_with_a_stuck_context_is_replaced(pool: BrowserPool, monkeypatch: pytest.MonkeyPatch) -> None:
    old = pids_of(pool, "browser")
    async with pool.session() as session:
        await session.reset(page_task("first"))
        monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.0)
    await eventually(lambda: pool.counters.recycled_by_stuck_contexts == 1)
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 10.0)
    await eventually(lambda: not alive_pids(old))
    assert await serves(pool)


async def test_a_browser_that_opens_no_context_is_replaced_and_ends(
    pool: BrowserPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = pids_of(pool, "browser")
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_step_seconds", 0.0)
        with pytest.raises(BrowserTimeout, match="no context within"):
            await pool.episode(page_task("first")).__aenter__()
    await eventually(lambda: not alive_pids(old))
    assert (pool.counters.recycled_by_stuck_contexts, pool.counters.retries) == (2, 1)
    assert await serves(pool)


async def test_resident_memory_counts_private_memory_and_shares_of_shared_memory() -> None:
    code = "import time; held = bytearray(64 << 20); print(flush=True); time.sleep(600)"
    with started([sys.executable, "-c", code], start_new_session=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert 64 < resident_mib([holder.pid]) < 64 + 40
    assert resident_mib([holder.pid]) == 0


@pytest.mark.parametrize("victim", ["browser", pytest.param("driver", marks=pytest.mark.slow)])
async def test_a_reset_that_crashes_is_retried(pool: BrowserPool, counting: CountingSite, victim: str) -> None:
    async def kill(page: Page, opening: int) -> None:
        if opening == 1:
            send(pool, signal.SIGKILL, victim)

    counting.before = kill
    async with pool.episode(page_task("first")) as (session, seen):
        assert seen.title == "First"
        assert (await session.step(WAIT)).title == seen.title
        assert (counting.openings, pool.counters.retries) == (2, 1)


async def test_a_reset_is_not_retried_where_the_site_is_the_cause(pool: BrowserPool, counting: CountingSite) -> None:
    counting.before = lambda page, opening: page.goto("chrome://crash")
    with pytest.raises(PageCrashed, match="renderer process has crashed"):
        await pool.episode(page_task("first")).__aenter__()
    assert (counting.openings, pool.counters.retries) == (2, 1)
    await eventually(lambda: pool.gauges()["sessions_in_use"] == 0)
    counting.before = lambda page, opening: page.goto(GONE)
    with pytest.raises(BrowserError, match=r"reset of site/first failed: .*; gone\.localhost:80 cannot be reached"):
        await pool.episode(page_task("first")).__aenter__()
    assert (counting.openings, pool.counters.retries) == (3, 1)


# Browsers of a root process: as another user, in a network of their own

CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"


async def test_the_open_web_needs_a_user_of_its_own_where_the_process_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=r"set browser\.user=nobody or another user, run as another user, or set"):
        check_browser_user(BrowserConfig(open_web=True))
    for settings in ({"open_web": True, "user": "nobody"}, {"open_web": True, "user": "root"}, {}):
        check_browser_user(BrowserConfig(**settings))  # type: ignore[arg-type]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check_browser_user(BrowserConfig(open_web=True))
    with pytest.raises(ConfigError, match=r"browser\.user=nobody needs root"):
        check_browser_user(BrowserConfig(user="nobody"))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
async def test_an_unknown_user_and_root_under_another_name_are_refused(site: FolderSite) -> None:
    for user, message in (("no-such-user", "is not a user of this machine"), ("0", "is root under another name")):
        with pytest.raises(ConfigError, match=message):
            BrowserPool(BrowserConfig(user=user), {"site": site}, 1)


@needs_root
async def test_browsers_run_as_their_user_and_reach_only_the_egress_proxy(site: FolderSite) -> None:
    async with (
        Server(answering(OK)) as neighbour,
        BrowserPool(BrowserConfig(width=400, height=300, user="nobody"), {"site": site}, 1) as pool,
        pool.episode(page_task("first")) as (session, observation),
    ):
        assert observation.title == "First"
        assert pool._isolation is not None
        namespace = pool._isolation.namespace
        assert namespace is not None
        (browser,) = pool.browsers
        chromium = psutil.Process(browser.chromium.pid)
        processes = [chromium, *chromium.children(recursive=True)]
        assert len(processes) > 2
        assert {process.uids() for process in processes} == {(65534, 65534, 65534)}
        assert "--no-sandbox" not in chromium.cmdline()
        own = os.readlink(namespace.path)
        assert own != os.readlink("/proc/self/ns/net")
        assert os.readlink(f"/proc/{chromium.pid}/ns/net") == own
        assert "NoNewPrivs:\t1" in Path(f"/proc/{chromium.pid}/status").read_text()

        def reaches(port: int) -> bool:
            command = ["nsenter", f"--net={namespace.path}", sys.executable, "-c", CONNECT, str(port)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        assert reaches(session.network.port)
        assert not reaches(neighbour.port)
        assert neighbour.connections == 0
        interfaces = subprocess.run(
            ["nsenter", f"--net={namespace.path}", "ip", "-o", "link"], capture_output=True, text=True, check=True
        ).stdout
        assert [line.split()[1] for line in interfaces.splitlines()] == ["lo:"]
        home = browser.chromium._home
        assert home is not None
        assert home.is_dir()
    assert not home.exists()
