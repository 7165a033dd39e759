"""A small site of the tests' own, and browser pools on it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from playwright.async_api import Page

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress import egress_policy
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.tasks.server import FolderServer, _HttpServer
from megatron_webrl.types import Task

ORIGIN = "http://site.localhost"


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[_HttpServer]:
    found: list[_HttpServer] = []
    accept = _HttpServer.get_request

    def get_request(server: _HttpServer) -> Any:
        found.append(server)
        return accept(server)

    monkeypatch.setattr(_HttpServer, "get_request", get_request)
    return found


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("scratch")
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(pool: BrowserPool) -> AsyncIterator[Session]:
    """A session on the pool of a module, for its tests that leave it intact."""
    async with pool.session() as session:
        yield session


class FolderSite:
    """Serves the pages of a folder; a page ends its task by setting the global `reward`."""

    def __init__(self, folder: Path, host: str = "site.localhost") -> None:
        self.folder, self.host = folder, host
        self.server = FolderServer(folder)

    @property
    def origins(self) -> frozenset[str]:
        return frozenset({f"http://{self.host}"})

    @property
    def addresses(self) -> dict[str, str]:
        return {self.host: self.server.address}

    def can_reuse_page(self, task: Task) -> bool:
        return False

    async def open(self, page: Page, task: Task) -> str:
        await page.goto(f"http://{self.host}/{task.environment}.html")
        return f"instruction of {task.environment}"

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        reward = await page.evaluate("() => window.reward === undefined ? null : window.reward")
        return reward, reward is not None


PAGES = {
    "first": "<title>First</title><a href=second.html style='display:block;height:100px;background:#ddd'>go</a>",
    "second": "<title>Second</title>second",
}


S = TypeVar("S", bound=FolderSite)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderSite]:
    with serving(FolderSite, tmp_path_factory.mktemp("site"), PAGES) as site:
        yield site


@pytest.fixture
def first_loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 127.0.0.1 stand in for a public address; the rest of 127.0.0.0/8 stays loopback."""
    real = egress_policy.special_address_kind
    monkeypatch.setattr(
        egress_policy,
        "special_address_kind",
        lambda address: None if address == ip_address("127.0.0.1") else real(address),
    )


def page_task(name: str) -> Task:
    return Task(id=f"site/{name}", source="site", environment=name, seed=0, max_steps=3)


def pool_on(site: FolderSite, sessions: int = 1, step_seconds: float = 20.0, **settings: Any) -> BrowserPool:
    """A pool with a viewport of 400x300 pixels; `settings` are fields of BrowserConfig."""
    chosen = {"width": 400, "height": 300, "screenshot": "png"} | settings
    return BrowserPool(BrowserConfig(**chosen), {"site": site}, sessions, step_seconds)


@contextmanager
def serving(kind: type[S], folder: Path, pages: Mapping[str, str]) -> Iterator[S]:
    write_pages(folder, pages)
    site = kind(folder)
    yield site
    site.server.close()


def write_pages(folder: Path, pages: Mapping[str, str]) -> None:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(f"<!DOCTYPE html>{text}")
