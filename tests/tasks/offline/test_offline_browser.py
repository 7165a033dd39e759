"""Offline websites in a real browser: reached by wildcard, read from screenshots, solved through a browser server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.browser.server.local_servers import local_servers
from megatron_webrl.browser.server.protocol import InvalidRequest, ResetRequest
from megatron_webrl.browser.server.task_catalog import TaskCatalog
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.judge.evaluation import answers_match
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.sites.questions import WebsiteGoal, website_goals
from megatron_webrl.tasks.sites.website_server import OfflineWebsites
from megatron_webrl.tasks.sites.websites import (
    DENYING_NUMBERS,
    BarCode,
    effects_digest,
    page_digest,
    page_key_of_path,
    website_host,
)
from megatron_webrl.types import Action, Task
from tools.offline.site_truth import read_bar_code

MAX_STEPS = 25


def goal_of(kind: str, number: int = 0) -> WebsiteGoal:
    goals = website_goals(website_host(kind.partition("-")[0], number)).values()
    return next(goal for goal in goals if goal.kind == kind)


def task_of(wanted: WebsiteGoal) -> Task:
    return Task(wanted.kind, "web", "page", 0, MAX_STEPS, wanted.goal.instruction, answer=wanted.answer, url=wanted.url)


def code_of(host: str, path: str, *effects: tuple[str, ...], denied: bool = False) -> BarCode:
    return BarCode(page_digest(page_key_of_path(host, path)), effects_digest(effects), denied)


async def test_a_screenshot_says_which_page_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    websites = OfflineWebsites()
    async with BrowserPool(BrowserConfig(deny=["wiki-5.localhost"]), {"web": websites}, 1, 60.0) as pool:
        for kind, width, height in (("wiki-is-mayor", 160, 224), ("wiki-correct-fact", 640, 480)):
            monkeypatch.setattr(pool, "_settings", replace(pool._settings, width=width, height=height))
            wanted = goal_of(kind, 1)
            task = task_of(wanted)
            async with pool.episode(task) as (session, seen):
                assert read_bar_code(seen.screenshot) == code_of(wanted.host, wanted.goal.start_path)
                for _ in range(MAX_STEPS):
                    action = await websites.demonstrate(session.page, task)
                    if action.kind == "answer":
                        break
                    seen = await session.step(action)
                    assert read_bar_code(seen.screenshot) is not None
                assert action.text == wanted.answer
                final = seen.url.removeprefix(f"http://{wanted.host}")
                assert read_bar_code(seen.screenshot) == code_of(wanted.host, final, *wanted.goal.effects)
                if width == 160:
                    continue
                denying = website_host("forms", DENYING_NUMBERS.start)
                seen = await session.step(Action("navigate", url=f"http://{denying}/poll"))
                assert read_bar_code(seen.screenshot) == code_of(denying, "/poll", denied=True)
                with pytest.raises(ScriptedPolicyError, match=f"is not a page of {wanted.host}"):
                    await websites.demonstrate(session.page, task)
                for host in (
                    "wiki.localhost",
                    "wiki-x.localhost",
                    "other.example",
                    "wiki-5.localhost",
                    "wiki-6.localhost",
                ):
                    seen = await session.step(Action("navigate", url=f"http://{host}/"))
                    reached = read_bar_code(seen.screenshot) == code_of(host, "/")
                    assert reached == (host == "wiki-6.localhost"), (host, seen.error)
    websites.close()


def test_a_catalog_opens_what_its_settings_permit() -> None:
    offline, far = "http://shop-1.localhost/", "http://a.example/"
    for open_web, websites in ((False, True), (True, True), (False, False)):
        config = Config(browser=BrowserConfig(open_web=open_web), tasks=tasks_config(offline_websites=websites))
        catalog = TaskCatalog.from_config(config)
        for url, permitted, setting in (
            (offline, websites, "tasks.offline_websites"),
            (far, open_web, "browser.open_web"),
        ):
            request = ResetRequest(Task("x", "web", "page", 0, 1, url=url))
            if permitted:
                assert catalog.resolve_task(request) is request.task
            else:
                with pytest.raises(InvalidRequest, match=rf"^task.url: .*; start (it|the server) with {setting}=true$"):
                    catalog.resolve_task(request)
        catalog.close()
        if catalog.web is not None:
            with pytest.raises(RuntimeError, match="was closed"):
                _ = catalog.web.addresses


async def test_a_browser_server_demonstrates_tasks_of_offline_websites(tmp_path: Path) -> None:
    config = Config(
        browser=BrowserConfig(width=640, height=480), tasks=tasks_config(offline_websites=True),
        rollout=RolloutConfig(operation_timeout_seconds=30),
    )  # fmt: skip
    async with (
        local_servers(config, 1, tmp_path) as servers,
        BrowserClient(servers.poll_addresses, servers.token, step_seconds=30) as browsers,
        browsers.session() as session,
    ):
        wanted = goal_of("forum-last-word")
        seen = await session.reset(ResetRequest(task_of(wanted)))
        assert seen.instruction == wanted.goal.instruction
        action = await session.demonstration()
        while action.kind != "answer":
            seen = await session.step(action)
            action = await session.demonstration()
        assert answers_match(action.text or "", wanted.answer)
        assert (seen.reward, seen.done) == (None, False)
        assert (code := read_bar_code(seen.screenshot)) is not None
        assert code.effects == effects_digest(wanted.goal.effects)
        await session.reset(ResetRequest(Task("x", "web", "page", 0, 1, "Another task.", url=wanted.url)))
        with pytest.raises(ScriptedPolicyError, match="has no scripted policy"):
            await session.demonstration()
