"""The first page of a task on the web: still loading, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.page import settle
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Task
from tests.browser.conftest import ORIGIN, FolderSite, page_task, pool_on, serving

LOOPBACK = r"127\.0\.0\.1 leads to 127\.0\.0\.1, which is a loopback address"

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Web(FolderSite):
    """Opens a task's URL as tasks on the web do."""

    async def open(self, page: Page, task: Task) -> str:
        return await OpenWeb(task.max_steps).open(page, task)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    pages = {"waiting": "<title>Waiting</title><img src=slow.html>text"}
    with serving(Web, tmp_path_factory.mktemp("web"), pages) as web:
        yield web


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(web: Web) -> AsyncIterator[BrowserPool]:
    async with pool_on(web) as pool:
        yield pool


def start_at(url: str) -> Task:
    return replace(page_task("start"), url=url)


async def test_a_page_that_never_finishes_loading_is_shown(pool: BrowserPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "LOAD_SECONDS", 1.0)
    never = asyncio.Event()

    async def silent(route: Route) -> None:
        await never.wait()
        await route.abort()

    async with pool.session() as session:
        await session.page.route("**/slow.html", silent)
        seen = await session.reset(start_at(f"{ORIGIN}/waiting.html"))
        assert (seen.title, seen.error) == ("Waiting", "the page is still loading")
        assert seen.seconds is not None
        assert 1 <= seen.seconds.settling < settle.SETTLE_SECONDS
        never.set()


@pytest.mark.parametrize("url", ["http://127.0.0.1:8009/start?a=b#c", "https://127.0.0.1:8009/"])
async def test_a_refused_page_is_no_episode(pool: BrowserPool, url: str) -> None:
    async with pool.session() as session:
        with pytest.raises(BrowserError, match=LOOPBACK):
            await session.reset(start_at(url))


async def test_a_refused_page_leaves_no_recording(web: Web, tmp_path: Path) -> None:
    async with pool_on(web, record=str(tmp_path / "recordings")) as pool, pool.session() as session:
        with pytest.raises(BrowserError, match=LOOPBACK):
            await session.reset(start_at("http://127.0.0.1:8009/"))
    assert not list(tmp_path.rglob("*.zip"))
