"""The pages in real Chromium: what they show, that hostile content stays inert, and that all can use them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, async_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.config.schema import Config
from megatron_webrl.types import Trajectory
from tests.monitor.runs import episode, serve, store, write_run, write_updates

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</pre></bdi><svg onload=document.title='owned'> \u202emoc.live\u202c \x1b[2J <|im_end|> javascript:alert(1) "
)
FOREIGN = "main script, main iframe, main svg[onload], main img:not([src^='/api/'])"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


def hostile() -> Trajectory:
    made = episode(7)
    task = replace(made.task, id=f"web/{HOSTILE}", website=HOSTILE, difficulty="hard")
    steps = tuple(
        replace(step, title=HOSTILE, url=HOSTILE, format_error=HOSTILE, action=replace(step.action, text=HOSTILE))
        for step in made.steps
        if step.action
    )
    assert made.verdict is not None
    stages = tuple(replace(each, text=HOSTILE, subject=HOSTILE, model=HOSTILE) for each in made.verdict.stages)
    verdict = replace(made.verdict, reason=HOSTILE, stages=stages)
    return replace(
        made, task=task, steps=steps, verdict=verdict, instruction=HOSTILE + "y" * 10_000_000, worker=HOSTILE,
        outcome=HOSTILE[:40], end_reason=HOSTILE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Config:
    config = write_run(tmp_path_factory.mktemp("runs"), str(tiny_model))
    store(config, *([episode(ticket, 0, reward=1.0), episode(ticket, 1)] for ticket in range(40)))
    store(config, [hostile()], became="stale")
    store(config, [episode(3, steps=0, outcome="browser_timeout")], kind="after")
    write_updates(config, 30)
    return config


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    """Seven more runs, one with a hostile name and settings."""
    made = [write_run(tmp_path_factory.mktemp("others"), name=name) for name in (HOSTILE.replace("/", "|"), *"bcdefg")]
    for config in made:
        write_updates(config, 20)
    made[0].model.path = made[0].tasks.cache = HOSTILE
    (made[0].run_folder / "config.yaml").write_text(yaml.safe_dump(asdict(made[0])))
    line = {"version": 0, "kind": "before", "temperature": 0.0, "success_of_judged": 0.25}
    blank = line | {"kind": "blank_images", "success_of_judged": 0.125}  # as an older run names it
    variant = line | {"variant": "blank_images", "temperature": 1.0, "success_of_judged": 0.5}
    text = "".join(json.dumps(each) + "\n" for each in (line, blank, variant))
    (made[1].run_folder / "evaluations.jsonl").write_text(text)
    return made


@asynccontextmanager
async def opened(run: Config, viewport: dict[str, int], others: Sequence[Config] = ()) -> AsyncIterator[Page]:
    """The first page, in a browser of its own that may reach nothing else; a script error fails the test."""
    async with serve(run, *others) as (address, _), async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=find_chromium(), chromium_sandbox=use_sandbox())
        context = await browser.new_context(viewport=viewport, color_scheme="light")  # type: ignore[arg-type]
        page = await context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: (
                problems.append(message.text) if message.type == "error" and "404" not in message.text else None
            ),
        )
        origin = address.partition("/?")[0]
        page.on("request", lambda each: None if each.url.startswith((origin, "data:")) else problems.append(each.url))
        await page.goto(address)
        await page.locator("h1").wait_for()
        yield page
        await browser.close()
        assert not problems


async def go(page: Page, place: str) -> None:
    await page.evaluate("place => { document.querySelector('h1')?.remove(); location.hash = place; }", place)
    await page.locator("h1").wait_for()


async def wide(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    return int(await page.evaluate("document.documentElement.scrollWidth - innerWidth"))


async def episode_with(page: Page, words: str) -> None:
    await go(page, f"#/episodes?text={words}")
    await page.locator("tbody a").first.click()
    await page.locator("section.step").first.wait_for()


async def test_a_newcomer_finds_why_an_episode_failed_and_what_the_model_saw(run: Config):
    async with opened(run, DESKTOP) as page:
        await page.get_by_role("link", name="Episodes").click()
        await page.get_by_label("failure").check()
        await page.get_by_text("1 to 40 of 40 episodes").wait_for()
        await page.locator("tbody a").first.click()
        await page.get_by_text("fact 1 is missing").wait_for()
        assert await page.locator("section.step .shot img").count() == 4
        assert await page.evaluate("[...document.images].every(each => each.src.startsWith(location.origin))")
        await page.locator("section.step summary").nth(2).click()
        await page.get_by_text("The prompt: 2 screenshots, without 1").wait_for()
        await page.locator(".token").first.click()
        await page.get_by_text("log-probability").wait_for()
        await page.get_by_role("link", name="Its group of 2").click()
        await page.get_by_text("2 shown of 2").wait_for()
        assert await page.locator(".columns > section").count() == 2


async def test_filters_sorting_and_paging_make_addresses_that_can_be_shared(run: Config):
    async with opened(run, DESKTOP) as page:
        await go(page, "#/episodes?outcome=success")
        await page.get_by_role("button", name="Version").click()
        await page.get_by_role("button", name="Next").is_disabled()
        assert await page.locator(".rows tbody tr").nth(0).locator("td").nth(7).inner_text() == "39"
        await go(page, "#/episodes")
        await page.get_by_role("button", name="Next").click()
        await page.get_by_text("51 to 82 of 82").wait_for()
        address = page.url
        await page.reload()
        await page.get_by_text("51 to 82 of 82").wait_for()
        assert page.url == address
        await page.get_by_role("searchbox").fill("no such words")
        await page.get_by_role("searchbox").press("Enter")
        await page.get_by_text("No episode passes these filters.").wait_for()


async def test_hostile_content_is_shown_and_does_nothing(run: Config):
    async with opened(run, DESKTOP) as page:
        await episode_with(page, "owned")
        assert "owned'</script>" in await page.locator("h1").inner_text()
        text = await page.locator("main").inner_text()
        assert "\u202e" not in text
        assert "\\u202e" in text
        for summary in await page.locator("section.step summary").all():
            await summary.click()
        assert "owned" not in await page.title() or "<script>" in await page.title()
        assert (
            await page.locator("main script, main iframe, main svg[onload], main img:not([src^='/api/'])").count() == 0
        )
        identifier = page.url.rpartition("/")[2]
        for place in (
            f"#/group/{identifier}",
            f"#/task/{identifier}",
            "#/episodes",
            "#/",
            "#/episode/999999",
            "#/nothing",
        ):
            await go(page, place)
            assert await page.locator("main script, main iframe").count() == 0


async def test_runs_are_compared_with_the_keyboard_alone(run: Config, others: list[Config]):
    async with opened(run, DESKTOP, others=others) as page:
        await page.get_by_role("link", name="Compare").press("Enter")
        await page.get_by_role("img", name="Reward of trained episodes: mean over update 1 to 30").wait_for()
        lines = page.locator("figure").first.locator("polyline")
        styles = [await each.get_attribute("class") for each in await lines.all()]
        assert len(styles) == len(set(styles)) == 8, "each run has a combination of colour and dashes of its own"
        await page.get_by_label("trained trajectories").press("Space")
        await page.get_by_role("img", name="episodes: mean over trained trajectories 64 to 1,920").wait_for()
        await page.get_by_label("hours since").press("Space")
        await page.get_by_role("img", name="mean over hours since the first update began 0.001 to 0.484").wait_for()
        await page.get_by_label("worker with engine and browsers").press("Space")
        await page.get_by_role("img", name="Host memory, GiB: worker").wait_for()
        assert await page.evaluate("document.activeElement.type") == "checkbox", "the focus stays where it was"
        await page.get_by_label("look", exact=True).press("Space")
        await page.get_by_role("img", name="hours since the first update began 0.001 to 0.318").first.wait_for()
        await page.reload()
        await page.get_by_role("img", name="Host memory, GiB: worker").wait_for()
        assert not await page.get_by_label("look", exact=True).is_checked()
        figures = page.get_by_role("region", name="Last and best figures")
        assert "best 100.0% at version 20" in await figures.inner_text()
        row = page.get_by_role("region", name="Settings that differ").get_by_role("row", name="model.path")
        assert "\\u202e" in await row.inner_text()
        await page.get_by_role("link", name="b", exact=True).click()
        await page.get_by_text("update 20 of").wait_for()
        assert await page.locator("#run-name").inner_text() == "b"
        await page.get_by_role("link", name="Episodes").click()
        await page.get_by_text("0 to 0 of 0 episodes").wait_for()


async def test_a_hostile_name_of_a_run_is_shown_and_does_nothing(run: Config, others: list[Config]):
    async with opened(run, DESKTOP, others=others[:1]) as page:
        await go(page, "#/compare")
        assert "owned'<|script>" in await page.locator("main").inner_text()
        assert await page.locator(FOREIGN).count() == 0
        await page.locator("table a").last.click()
        await page.get_by_text("update 20 of").wait_for()
        assert await page.locator("#run-name").inner_text() == visible_name(others[0])
        assert await page.locator(FOREIGN).count() == 0


def visible_name(config: Config) -> str:
    return re.sub("[\x1b\u202c\u202e]", lambda match: f"\\u{ord(match[0]):04x}", config.run.name).strip()


async def looks(page: Page) -> AsyncIterator[None]:
    """Show the page in light and dark colours, on a desk and on a phone, each from its first script on."""
    for scheme in ("light", "dark"):
        for viewport in (DESKTOP, PHONE):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            await page.set_viewport_size(viewport)  # type: ignore[arg-type]
            await page.reload()
            await page.locator("h1").wait_for()
            yield


async def test_the_pages_are_accessible_and_fit(run: Config, others: list[Config]):
    async with opened(run, DESKTOP, others=others[:5]) as page:
        async for _ in looks(page):
            places = ["#/", "#/compare", "#/episodes", "#/episodes?sort=steps&outcome=success"]
            await episode_with(page, "click")
            identifier = page.url.rpartition("/")[2]
            for place in (*places, f"#/episode/{identifier}", f"#/group/{identifier}"):
                await go(page, place)
                assert await wide(page) <= 0, place
                found = await Axe().run(page)
                serious = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical")]
                assert not [(v["id"], [node["html"] for node in v["nodes"][:3]]) for v in serious], place
