"""Start, sessions and end of browsers."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from playwright.async_api import async_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.browser.errors import BrowserCrashed, BrowserMissing
from megatron_webrl.types import Action
from tests.browser.browser_processes import browser_pids
from tests.browser.conftest import FolderSite, page_task, pool_on


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


def test_a_missing_chromium_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrowserMissing, match="install Debian's package chromium-headless-shell"):
        find_chromium()
    with pytest.raises(BrowserMissing, match=r"browser\.executable=netscape is not an executable file"):
        find_chromium("netscape")


def test_the_headless_shell_is_preferred_over_other_browsers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("google-chrome", "chromium", "chromium-headless-shell"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert find_chromium() == str(tmp_path / name)


async def test_playwrights_own_build_is_found_where_playwright_looks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = find_chromium()
    shared, cache = tmp_path / "shared", tmp_path / ".cache" / "ms-playwright"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(shared))
    plan = subprocess.check_output(
        [sys.executable, "-m", "playwright", "install", "--dry-run", "chromium-headless-shell"], text=True, timeout=60
    )
    folder = Path(re.findall(r"Install location: +(.+)", plan)[0])
    assert folder.parent == shared
    machine = {"x86_64": "linux64", "aarch64": "linux-arm64"}[platform.machine()]
    build = folder / f"chrome-headless-shell-{machine}" / "chrome-headless-shell"
    assert find_chromium() == system  # the variable is set, but nothing is installed
    for path in (build, shared / "chromium_headless_shell-999" / build.parent.name / build.name):
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/sh\nexec {system} "$@"\n')
        path.chmod(0o755)
    assert find_chromium() == str(build)  # 999 is older than the revision of this Playwright
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(headless=True, chromium_sandbox=use_sandbox())
        assert browser.version
        await browser.close()
    cache.parent.mkdir()
    shared.rename(cache)
    monkeypatch.delenv("PLAYWRIGHT_BROWSERS_PATH")
    assert find_chromium() == system  # the system's comes before the default folder
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_chromium() == str(cache / build.relative_to(shared))


async def test_each_session_has_a_context_of_its_own(site: FolderSite) -> None:
    async with pool_on(site, sessions=2) as pool:
        for _ in range(3):
            async with pool.session() as session:
                assert (await session.reset(page_task("store"))).title == "fresh"
        assert pool.counters.launches == 1


async def test_no_process_of_a_browser_has_the_keys_and_tokens_of_its_parent(
    site: FolderSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Chromium's sandbox, as for root, a page that takes over its renderer reads the environment."""
    for name in ("GEMINI_API_KEY", "WEBRL_BROWSERS_TOKEN", "WEBRL_BROWSERS_SERVER_TOKEN", "https_proxy"):
        monkeypatch.setenv(name, "canary-7f3a")
    others = set(psutil.Process().children(recursive=True))  # a server that earlier tests left, for example
    async with pool_on(site) as pool, pool.session():
        found = []
        for process in set(psutil.Process().children(recursive=True)) - others:
            with suppress(psutil.Error):  # it has ended
                found.append(process.environ())
    browsers = [environment for environment in found if "PATH" in environment]  # renderers overwrite theirs
    assert len(browsers) > 2
    assert {environment["TZ"] for environment in browsers} == {"UTC"}
    assert not [name for environment in found for name, value in environment.items() if "canary" in value]


async def test_no_more_sessions_than_allowed_run_at_a_time(site: FolderSite) -> None:
    running = most = 0

    async def episode() -> None:
        nonlocal running, most
        async with pool.session() as session:
            running += 1
            most = max(most, running)
            await session.reset(page_task("first"))
            running -= 1

    async with pool_on(site, sessions=2) as pool:
        await asyncio.gather(*(episode() for _ in range(6)))
    assert most == 2


async def test_a_killed_browser_fails_its_sessions_and_is_relaunched(site: FolderSite) -> None:
    async with pool_on(site, sessions=2) as pool:
        async with pool.session() as session:
            await session.reset(page_task("first"))
            waiting = asyncio.ensure_future(session.step(Action("wait", time=5)))
            os.kill(browser_pids("browser")[0], signal.SIGKILL)
            with pytest.raises(BrowserCrashed, match="Chromium has ended"):
                await waiting
        async with pool.session() as session:
            assert (await session.reset(page_task("second"))).title == "Second"
        assert pool.counters.launches == 2


@pytest.mark.alone
async def test_closing_leaves_no_process_and_nothing_in_shared_memory(site: FolderSite) -> None:
    before, shared = children(), set(os.listdir("/dev/shm"))
    async with pool_on(site, sessions=4) as pool:
        async with pool.session() as session:
            await session.reset(page_task("first"))
        during = children() - before
        assert len(during) >= 3  # driver, browser, renderer
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in during if psutil.pid_exists(pid)], timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "chrom" in name}


async def test_a_stopped_browser_is_killed_within_the_limit(site: FolderSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_webrl.browser.chromium.CLOSE_SECONDS", 1.0)
    pool = pool_on(site)
    await pool.start()
    pid = browser_pids("browser")[0]
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        await pool.close()
    gone, _ = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert gone or not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
