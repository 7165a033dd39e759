"""Record episodes on a server whose pages change at each visit, and replay them without the server."""

from __future__ import annotations

import itertools
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress.har import HAR_MEMBER, READ_REQUEST_HEADERS, ReplayRequest, RequestKey, har_name
from megatron_webrl.browser.errors import NotRecorded
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.types import Action, Observation, Task

ORIGIN = "http://site.localhost"
TASK = Task(id="moody/../start <1>", source="moody", environment="start", seed=0, max_steps=9)


class MoodySite:
    """Returns a different response to every request."""

    origins = frozenset({ORIGIN})

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._server = LocalServer(self._respond, "moody")
        self.addresses = {"site.localhost": self._server.address}
        self.close = self._server.close

    def _respond(self, request: PageRequest) -> PageResponse:
        count, random_number = next(self._count), random.random()
        if request.path == "/old":
            return PageResponse(302, headers={"Location": "/start?moved", "Set-Cookie": f"moved={count}"})
        if request.path == "/data":
            return PageResponse(200, f"{count} {request.form.get('ask')} {random_number}".encode(), "text/plain")
        text = f"""<!DOCTYPE html><title>{request.path} {count}</title><p>{random_number}</p>
            <button style='position:absolute;left:0;top:0;width:400px;height:100px'>ask</button>
            <script>document.querySelector('button').onclick =
              async () => {{ const ask = (word) => fetch('/data', {{method: 'POST',
                  body: new URLSearchParams({{ask: word}})}}).then((answer) => answer.text());
                document.querySelector('p').textContent = await ask('one') + ' ' + await ask('two') +
                  ' ' + await ask('one') + document.cookie; }}</script>"""
        return PageResponse(200, text.encode(), headers={"Set-Cookie": f"visit={count}", "Cache-Control": "no-store"})

    def can_reuse_page(self, task: Task) -> bool:
        return False

    async def open(self, page: Page, task: Task) -> str:
        await page.goto(f"{ORIGIN}/{task.environment}")
        return "look"

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False


def pool_on(site: MoodySite, **settings: Any) -> BrowserPool:
    chosen = BrowserConfig(width=400, height=300, screenshot="png", **settings)
    return BrowserPool(chosen, {"moody": site}, 1, 20.0)


STEPS = (
    Action("left_click", coordinate=(100, 100)), Action("navigate", url=f"{ORIGIN}/start"),
    Action("navigate", url=f"{ORIGIN}/old"), Action("go_back"),
)  # fmt: skip


async def episode(session: Session, task: Task, *steps: Action) -> list[tuple[str, Observation]]:
    """Text of the page and observation at each step."""
    seen = [await session.reset(task)]
    texts = [await session.page.inner_text("body")]
    for action in steps:
        seen.append(await session.step(action))
        texts.append(await session.page.inner_text("body"))
    return list(zip(texts, seen, strict=True))


async def record(site: MoodySite, folder: Path, task: Task, *steps: Action) -> list[tuple[str, Observation]]:
    async with pool_on(site, record=str(folder)) as pool, pool.session() as session:
        return await episode(session, task, *steps)


@pytest.mark.slow
async def test_an_episode_is_replayed_identically_without_its_server(tmp_path: Path) -> None:
    site = MoodySite()
    first = await record(site, tmp_path, TASK, *STEPS)
    assert len({text for text, _ in first}) == len(first)  # no page came twice
    assert "one" in first[1][0]
    assert [file.name for file in tmp_path.iterdir()] == [f"{har_name(TASK)}.0.zip"]
    site.close()
    for _ in range(2):
        async with pool_on(site, replay=str(tmp_path)) as pool, pool.session() as session:
            assert await episode(session, TASK, *STEPS) == first
            assert pool.egress_proxy.totals.connections == 0


async def test_an_unrecorded_request_is_reported_and_refused(tmp_path: Path) -> None:
    site = MoodySite()
    await record(site, tmp_path, TASK)
    async with pool_on(site, replay=str(tmp_path)) as pool, pool.session() as session:
        before = next(site._count)
        await session.reset(TASK)
        seen = await session.step(Action("navigate", url=f"{ORIGIN}/elsewhere"))
        assert f"GET {ORIGIN}/elsewhere was not recorded (browser.replay)" in str(seen.error)
        assert session.network.refused["not_recorded"] == 1
        assert next(site._count) == before + 1
    site.close()
    async with pool_on(site, replay=str(tmp_path)) as pool, pool.session() as session:
        with pytest.raises(NotRecorded, match="other has no archive"):
            await session.reset(replace(TASK, id="other"))


async def test_visits_are_merged_and_the_first_one_with_a_url_answers(tmp_path: Path) -> None:
    site = MoodySite()
    first = await record(site, tmp_path, TASK)
    second = await record(site, tmp_path, TASK, Action("navigate", url=f"{ORIGIN}/more"))
    site.close()
    assert len(list(tmp_path.iterdir())) == 2
    async with pool_on(site, replay=str(tmp_path)) as pool, pool.session() as session:
        replayed = await episode(session, TASK, Action("navigate", url=f"{ORIGIN}/more"))
    assert replayed[0] == first[0] != second[0]
    assert replayed[1][0] == second[1][0]


async def test_a_recording_has_no_credentials_of_requests_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    site = MoodySite()
    async with pool_on(site, record=str(tmp_path)) as pool, pool.session() as session:
        await session.reset(TASK)  # the site sets a cookie
        await session.page.evaluate("fetch('/data', {method: 'POST', body: 'x', headers: {Authorization: 'Bearer 1'}})")
        assert list(tmp_path.iterdir()) == []  # an episode that is killed leaves its files to the sweep of its pool
    site.close()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(file) as archive:
        entries = json.loads(archive.read(HAR_MEMBER))["log"]["entries"]
    sent = {header["name"].lower() for entry in entries for header in entry["request"]["headers"]}
    assert {"host", "content-length"} <= sent <= READ_REQUEST_HEADERS
    assert "visit=" in str([entry["response"]["headers"] for entry in entries])  # pages read their cookies


async def test_requests_with_different_bodies_are_different(tmp_path: Path) -> None:
    form = "multipart/form-data; boundary={}"

    def key(method: str, url: str, boundary: str = "", body: bytes | None = None) -> RequestKey:
        return ReplayRequest(method, url, form.format(boundary), body).key

    first = key("POST", "http://a.test/#x", "b1", b"--b1 word --b1")
    assert first == key("POST", "http://a.test/", "b2", b"--b2 word --b2")
    assert first != key("POST", "http://a.test/", "b2", b"--b2 another --b2")
    assert first != key("PUT", "http://a.test/", "b1", b"--b1 word --b1")
    assert key("GET", "http://a.test/?1") != key("GET", "http://a.test/?2")


async def test_contradictory_settings_and_missing_folders_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"browser.record=a and browser.replay=b are both set; leave one of them empty"
    ):
        BrowserConfig(record="a", replay="b").check()
    with pytest.raises(ConfigError, match=r"browser.record=/proc cannot be written: "):
        BrowserPool(BrowserConfig(record="/proc"), {}, 1)
    with pytest.raises(ConfigError, match=r"is not a folder; record one with browser.record"):
        BrowserPool(BrowserConfig(replay=str(tmp_path / "none")), {}, 1)


async def test_a_task_id_becomes_a_plain_file_name() -> None:
    names = {har_name(replace(TASK, id=text)) for text in ("a/b", "a_b", "../a b", "é" * 500, ".")}
    assert len(names) == 5
    assert all("/" not in name and not name.startswith(".") and len(name) < 100 for name in names)
