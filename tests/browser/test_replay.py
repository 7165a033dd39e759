"""Episodes recorded in Chromium and replayed: on a site whose every response differs, and on our own sites."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress.har import HAR_MEMBER, VISIT_MEMBER, visit_path
from megatron_webrl.browser.errors import BrowserError, NotRecorded
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.sites.site_task_source import SiteTaskSource
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Observation, Task, TaskSite
from tests.browser.changing_site import HEIGHT, PAPER, START, WIDTH, ChangingWeb, web_actions, web_task
from tests.browser.conftest import FolderSite, page_task, write_pages

QUOTE, STORY = Action("navigate", url=START), Action("navigate", url=f"{PAPER}/moved")
RESTLESS = """<title>Restless</title><style>div { width: 60px; height: 60px; background: red; }
    #turn { animation: turn 0.9s linear infinite; } @keyframes turn { to { transform: rotate(360deg); } }
    #come { opacity: 0; animation: come 3s 1s forwards; } @keyframes come { to { opacity: 1; } }
    #wide { transition: width 2s; } #wide.open { width: 200px; }</style>
    <div id=turn></div><div id=come></div><div id=wide onclick="this.className = 'open'"></div>"""
CLOCK = """<title>Clock</title><p></p><script>const start = Date.now();
    const later = (seconds) => Math.round((Date.now() - start) / 100) / 10;
    setTimeout(() => { let frames = 0; const frame = () => { if (++frames < 6) requestAnimationFrame(frame); else {
      while (later() < 0.6); const until = new Date(start).toISOString();
      document.cookie = "short=1; expires=" + new Date(Date.now() + 60000).toUTCString();
      document.querySelector("p").textContent = [later(), until, Date().length > 20, new Date(0).getTime(),
        Math.random(), crypto.getRandomValues(new Uint8Array(4)), document.cookie].join(" "); } };
      requestAnimationFrame(frame); }, 400);</script>"""


def pool_on(name: str, site: TaskSite, **settings: Any) -> BrowserPool:
    chosen = BrowserConfig(width=WIDTH, height=HEIGHT, screenshot="png", **settings)
    return BrowserPool(chosen, {name: site}, 1, 30.0)


async def play(pool: BrowserPool, task: Task, actions: Sequence[Action]) -> tuple[list[Observation], str]:
    """The observations of an episode, and the text of its last page."""
    async with pool.episode(task) as (session, first):
        seen = [first, *[await session.step(action) for action in actions]]
        return seen, await session.page.inner_text("body")


@pytest.fixture
def changing_web() -> Iterator[ChangingWeb]:
    site = ChangingWeb()
    yield site
    site.close()


async def record(
    site: ChangingWeb, folder: Path, task: Task, actions: Sequence[Action]
) -> tuple[list[Observation], str]:
    async with pool_on("web", site, record=str(folder)) as pool:
        found = await play(pool, task, actions)
    assert (pool.counters.recordings, pool.counters.failed_recordings) == (1, 0)
    return found


def rename_hosts(path: Path, names: Mapping[str, str]) -> None:
    """Replace text in every member of a recording."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    for old, new in names.items():
        members = {name: content.replace(old.encode(), new.encode()) for name, content in members.items()}
    replace_members(path, members)


def replace_members(path: Path, replaced: Mapping[str, bytes]) -> None:
    """Replace members of a recording."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {**members, **replaced}.items():
            file.writestr(name, content)


async def test_a_changing_site_is_replayed_as_it_was(tmp_path: Path, changing_web: ChangingWeb) -> None:
    """Redirects of pages, styles and forms, cookies, posts, compression, fonts, copies, times and random numbers."""
    task, actions = web_task(0), web_actions(0)
    recorded = await record(changing_web, tmp_path, task, actions)
    assert len({each.screenshot for each in recorded[0]}) > 4
    asked = len(changing_web.requests)
    async with pool_on("web", OpenWeb(9), replay=str(tmp_path), open_web=True) as pool:
        assert await play(pool, task, actions) == recorded
        assert await play(pool, task, actions) == recorded
    totals = pool.egress_proxy.totals
    assert (totals.connections, dict(totals.refused), len(changing_web.requests)) == (0, {}, asked)
    assert totals.replayed > 40


async def test_a_page_reloaded_after_a_copy_from_the_cache_is_the_recorded_one(
    tmp_path: Path, changing_web: ChangingWeb
) -> None:
    section = Action("navigate", url=f"{PAPER}/section")
    actions = [section, Action("navigate", url=f"{PAPER}/story/1"), Action("go_back"), section]
    recorded, text = await record(changing_web, tmp_path, web_task(0), actions)
    assert recorded[1].screenshot == recorded[3].screenshot != recorded[4].screenshot  # the copy, then another edition
    async with pool_on("web", OpenWeb(9), replay=str(tmp_path), open_web=True) as pool:
        assert await play(pool, web_task(0), actions) == (recorded, text)


async def test_a_year_old_recording_is_cached_as_a_fresh_one(tmp_path: Path, changing_web: ChangingWeb) -> None:
    _, text = await record(changing_web, tmp_path, web_task(0), [])
    path, year = visit_path(tmp_path, web_task(0), 0), 365 * 86400
    with zipfile.ZipFile(path) as file:
        visit, har = json.loads(file.read(VISIT_MEMBER)), json.loads(file.read(HAR_MEMBER))
    visit["clock_ms"] -= year * 1000
    for header in [each for entry in har["log"]["entries"] for each in entry["response"]["headers"]]:
        if header["name"].lower() == "date":
            header["value"] = formatdate(parsedate_to_datetime(header["value"]).timestamp() - year, usegmt=True)
    replace_members(path, {VISIT_MEMBER: json.dumps(visit).encode(), HAR_MEMBER: json.dumps(har).encode()})
    async with pool_on("web", OpenWeb(9), replay=str(tmp_path), open_web=True) as pool:
        _, again = await play(pool, web_task(0), [])
    shown, shown_again = (re.findall("editions.*", each) for each in (text, again))
    assert shown == shown_again
    first, copy, second, last = shown[0].split()[1:5]
    assert first == copy != second == last


async def test_other_actions_than_the_recorded_ones_are_answered_or_counted(
    tmp_path: Path, changing_web: ChangingWeb
) -> None:
    task = web_task(1)
    (first, _), _ = await record(changing_web, tmp_path, task, [STORY, QUOTE]), None
    async with pool_on("web", OpenWeb(9), replay=str(tmp_path), open_web=True) as pool:
        unknown = Action("navigate", url=f"{PAPER}/story/999")
        seen, text = await play(pool, task, [QUOTE, STORY, unknown, Action("go_back")])
        assert [each.not_recorded_requests for each in seen] == [0, 0, 0, 1, 1]
        assert seen[2].screenshot == seen[4].screenshot == first[1].screenshot
        assert f"GET {PAPER}/story/999 was not recorded (browser.replay)" in str(seen[3].error)
        assert text.startswith("Story")
        elsewhere = replace(task, url=f"{PAPER}/story/999")
        with pytest.raises(NotRecorded, match=r"the first page of web/paper/1, .*/story/999, was not recorded"):
            await play(pool, elsewhere, [])
    assert dict(pool.egress_proxy.totals.refused) == {"not_recorded": 2}


async def test_a_recording_of_https_is_replayed_without_its_host(tmp_path: Path, changing_web: ChangingWeb) -> None:
    task, actions = web_task(2), web_actions(2)
    recorded, text = await record(changing_web, tmp_path, task, actions)
    hosts = {"http://www.paper.test": "https://news.example", "http://media.paper.test": "https://m.example:8443"}
    rename_hosts(visit_path(tmp_path, task, 0), hosts)
    secure = replace(task, url="https://news.example/")
    actions = [replace(each, url=each.url and each.url.replace(PAPER, "https://news.example")) for each in actions]
    async with pool_on("web", OpenWeb(9), replay=str(tmp_path), open_web=True) as pool:
        seen, again = await play(pool, secure, actions)
    assert again == text
    assert [each.screenshot for each in seen] == [each.screenshot for each in recorded]  # its cache serves as before
    assert {each.url.split("/")[2] for each in seen} == {"news.example"}
    assert dict(pool.egress_proxy.totals.refused) == {}


async def test_the_result_of_a_site_is_replayed_with_its_responses(tmp_path: Path, reached: list[object]) -> None:
    with SiteTaskSource(["forms-vote"], TasksConfig(max_steps=9)) as source:
        task, actions = source.make_task("forms-vote", 3), []
        async with (
            pool_on("sites", source, record=str(tmp_path)) as pool, pool.episode(task) as (session, observation),
        ):  # fmt: skip
            recorded = [observation]
            while not observation.done:
                actions.append(await source.demonstrate(session.page, task))
                observation = await session.step(actions[-1])
                recorded.append(observation)
    assert reached
    reached.clear()
    with SiteTaskSource(["forms-vote"], TasksConfig(max_steps=9)) as source:
        async with pool_on("sites", source, replay=str(tmp_path)) as pool:
            seen, _ = await play(pool, task, actions)
            assert seen == recorded
            assert (seen[-1].reward, seen[-1].done) == (1.0, True)
            idle, _ = await play(pool, task, [Action("wait", time=1)])
            assert (idle[-1].reward, idle[-1].done) == (None, False)
        assert not reached


async def test_pages_at_work_look_the_same_at_any_time(tmp_path: Path) -> None:
    write_pages(tmp_path, {"restless": RESTLESS, "clock": CLOCK})
    site, tasks = FolderSite(tmp_path), (page_task("restless"), page_task("clock"))
    click, wait = Action("left_click", coordinate=(30, 310)), Action("wait", time=2)
    folder = tmp_path / "recordings"
    async with pool_on("site", site, record=str(folder)) as pool:
        recorded, _ = await play(pool, tasks[0], [wait, click])
        _, clock = await play(pool, tasks[1], [wait])
    site.server.close()
    assert recorded[0].screenshot == recorded[1].screenshot != recorded[2].screenshot
    assert clock.startswith("0.6 20")
    assert " true 0 0." in clock
    assert clock.endswith("short=1")
    async with pool_on("site", site, replay=str(folder)) as pool:
        assert (await play(pool, tasks[0], [wait, click]))[0] == recorded
        assert (await play(pool, tasks[1], [wait]))[1] == clock


async def test_an_episode_whose_page_could_not_be_opened_leaves_no_recording(tmp_path: Path) -> None:
    async with pool_on("web", OpenWeb(9), record=str(tmp_path)) as pool:
        with pytest.raises(BrowserError):
            await play(pool, replace(web_task(0), url="http://gone.invalid:9/"), [])
    assert list(tmp_path.iterdir()) == []
    assert (pool.counters.recordings, pool.counters.failed_recordings) == (0, 0)
