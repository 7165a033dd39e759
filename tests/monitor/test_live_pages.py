"""The page of rollouts in real Chromium, while workers change their states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

from megatron_webrl.config.schema import Config
from megatron_webrl.track.live_rollouts import ACTING, JUDGING, WAITING_FOR_MODEL
from tests.monitor.live_job import Worker, live_job
from tests.monitor.runs import episode, write_run
from tests.monitor.test_pages import DESKTOP, FOREIGN, HOSTILE, go, hostile, looks, opened, wide


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Config:
    return write_run(tmp_path, str(tiny_model))


def open_rollouts(worker: Worker, tickets: range) -> None:
    """Two rollouts of each ticket: one acts, one waits for the model."""
    for ticket in tickets:
        for index, state in enumerate((ACTING, WAITING_FOR_MODEL)):
            worker.open(replace(episode(ticket, index, steps=2), group_size=2)).set(state)


async def cell_text(page: Page, word: str) -> str:
    """What a reader of text hears of the active cell, once it holds a word."""
    await page.locator("#active-rollout", has_text=word).wait_for(state="attached")
    return await page.locator("#active-rollout").inner_text()


async def test_rollouts_are_found_by_keyboard_filtered_and_followed_while_they_change(run: Config):
    async with live_job(run, ("rollout-0", "rollout-1")) as [first, second], opened(run, DESKTOP) as page:
        open_rollouts(first, range(15))
        open_rollouts(second, range(15, 18))
        await page.get_by_role("link", name="Rollouts").click()
        await page.get_by_text("36 of 36 rollouts shown, of 2 workers").wait_for()
        await page.locator(".wall").focus()
        assert "rollout-0, ticket 0, episode 1" in await cell_text(page, "acting")
        for key, words in (
            ("ArrowRight", "ticket 0, episode 2"), ("ArrowDown", "rollout-1, ticket 15, episode 2"),
            ("Home", "ticket 0, episode 1"), ("End", "ticket 17, episode 2"), ("ArrowUp", "ticket 2, episode 2"),
        ):  # fmt: skip
            await page.keyboard.press(key)
            await cell_text(page, words)
        await page.get_by_role("button", name="waiting for model").click()
        await page.get_by_text("18 of 36 rollouts shown").wait_for()
        changed = first.table.get("training-1-1")
        assert changed is not None
        changed.set(JUDGING)
        await page.get_by_text("17 of 36 rollouts shown").wait_for()
        await page.get_by_role("searchbox").fill("rollout-1")
        await page.get_by_text("3 of 36 rollouts shown").wait_for()
        await page.get_by_label("Group by").select_option("group")
        assert page.url.endswith("#/rollouts?by=group&text=rollout-1&state=waiting+for+model")
        await page.reload()
        await page.get_by_text("3 of 36 rollouts shown").wait_for()
        second.table.close("training", 16)
        await page.get_by_text("2 of 34 rollouts shown").wait_for()


async def test_a_click_opens_an_episode_that_grows_until_it_ends(run: Config):
    async with live_job(run) as [worker], opened(run, DESKTOP) as page:
        live = worker.open(episode(7, 0, steps=1))
        await go(page, "#/rollouts")
        await page.get_by_text("1 of 1 rollouts shown").wait_for()
        await page.locator(".wall canvas").click(position={"x": 18, "y": 40})
        await page.locator("#step-1").wait_for()
        assert "http://shop.localhost/0" in await page.locator("#step-1").inner_text()
        await page.get_by_role("heading", name="The page now").wait_for()
        longer = replace(episode(7, 0, steps=3), outcome="", end_reason="", verdict=None)
        live.episode_so_far = lambda: longer
        live.set(ACTING)
        await page.locator("#step-3").wait_for()
        await page.locator("main [role=status]", has_text="acting").wait_for()
        loaded = "[...document.querySelectorAll('main img')].every(each => each.complete && each.naturalWidth === 320)"
        await page.locator("section.step").last.scroll_into_view_if_needed()
        await page.wait_for_function(loaded)
        worker.table.close("training", 7)
        await page.get_by_text("This rollout has ended.").wait_for()


async def test_the_live_pages_are_accessible_and_fit_and_hostile_rollouts_do_nothing(run: Config):
    async with live_job(run) as [worker], opened(run, DESKTOP) as page:
        open_rollouts(worker, range(20))
        attack = replace(hostile(), ticket=70, instruction=HOSTILE, outcome="failure", end_reason="answer", worker="")
        worker.open(attack).finish("failure")
        worker.open(replace(attack, ticket=80)).finish(HOSTILE)
        async for _ in looks(page):
            for by in ("worker", "task", "site", "state"):
                await go(page, f"#/rollouts?by={by}")
                await page.get_by_text("42 of 42 rollouts shown").wait_for()
                await page.locator(".wall").focus()
                await page.keyboard.press("End")
                await _check(page)
            await go(page, "#/rollout/rollout-0/training-70-0")
            await page.locator("section.step").nth(1).wait_for()
            assert "owned'</script>" in await page.locator("h1").inner_text()
            await _check(page)


async def _check(page: Page) -> None:
    assert await wide(page) <= 0
    assert await page.locator(FOREIGN).count() == 0
    assert "\u202e" not in await page.locator("main").inner_text()
    assert "owned" not in await page.title() or "<script>" in await page.title()
    found = await Axe().run(page)
    serious = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical")]
    assert not [(v["id"], [node["html"] for node in v["nodes"][:3]]) for v in serious]
