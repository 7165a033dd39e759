"""The pages in real Chromium: what they show, that hostile content stays inert, and that all can use them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.config.schema import Config
from megatron_webrl.monitor import live_view
from megatron_webrl.track.live_rollouts import ACTING, JUDGING, WAITING_FOR_MODEL
from megatron_webrl.types import Trajectory
from tests.monitor.live_job import Worker, live_job
from tests.monitor.runs import episode, make_run, serve, store, train_unevenly

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</pre></bdi><svg onload=document.title='owned'> \u202emoc.live\u202c \x1b[2J <|im_end|> javascript:alert(1) "
)
HOSTILE_NAME = HOSTILE.replace("/", "|")
FOREIGN = "main script, main iframe, main svg[onload], main img:not([src^='/api/'])"
LOOKS: list[tuple[Any, Any]] = [("light", {"width": 1280, "height": 800}), ("dark", {"width": 390, "height": 844})]


def hostile(ticket: int) -> Trajectory:
    made = episode(ticket)
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
        made, task=task, steps=steps, verdict=verdict, instruction=HOSTILE + "y" * 1_000_000, worker=HOSTILE,
        outcome=HOSTILE[:40], end_reason=HOSTILE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[Config]:
    """A run with episodes and seven without, of which one has a hostile name and settings."""
    run = make_run(tmp_path_factory.mktemp("runs"), f"model.path={tiny_model}", name="look")
    for ticket in range(40):
        steps = 3 if ticket > 36 else 1
        store(run, [episode(ticket, 0, reward=1.0, steps=steps), episode(ticket, 1, steps=steps)])
    store(run, [hostile(7)], became="stale")
    store(run, [episode(3, steps=0, outcome="browser_timeout")], kind="after")
    train_unevenly(run, 30)
    others = [make_run(tmp_path_factory.mktemp("others"), name=name) for name in "abcdefg"]
    others[0].run.name, others[0].model.path, others[0].tasks.cache = HOSTILE_NAME, HOSTILE, HOSTILE
    others[0].run_folder.mkdir()
    (others[0].run_folder / "config.yaml").write_text(yaml.safe_dump(asdict(others[0])))
    for config in others:
        train_unevenly(config, 20)
    line = {"version": 0, "kind": "before", "temperature": 0.0, "success_of_judged": 0.25}
    blank = line | {"kind": "blank_images", "success_of_judged": 0.125}  # as an older run names it
    variant = line | {"variant": "blank_images", "temperature": 1.0, "success_of_judged": 0.5}
    text = "".join(json.dumps(each) + "\n" for each in (line, blank, variant))
    (others[1].run_folder / "evaluations.jsonl").write_text(text)
    return [run, *others]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(runs: list[Config]) -> AsyncIterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_view, "POLL_SECONDS", 0.05)
        async with serve(*runs) as (address, _):
            yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(runs: list[Config]) -> AsyncIterator[list[Worker]]:
    async with live_job(runs[0], ("rollout-0", "rollout-1")) as workers:
        yield workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=find_chromium(), chromium_sandbox=use_sandbox())
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, address: str) -> AsyncIterator[Page]:
    """The first page, in a context that may reach nothing else; a script error fails the test."""
    context = await browser.new_context(viewport=LOOKS[0][1], color_scheme="light")
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
    await context.close()
    assert not problems


async def go(page: Page, place: str) -> None:
    await page.evaluate("place => { document.querySelector('h1')?.remove(); location.hash = place; }", place)
    await page.locator("h1").wait_for()


async def open_episode(page: Page, words: str) -> str:
    """Open an episode whose texts have some words; returns its number."""
    await go(page, f"#/episodes?text={words}")
    await page.locator("tbody a").first.click()
    await page.locator("section.step").first.wait_for()
    return page.url.rpartition("/")[2]


async def looks(page: Page) -> AsyncIterator[dict[str, int]]:
    """Show the page in light colours on a desk, and in dark ones on a phone, each from its first script on."""
    for scheme, viewport in LOOKS:
        await page.emulate_media(color_scheme=scheme)
        await page.set_viewport_size(viewport)
        await page.reload()
        await page.locator("h1").wait_for()
        yield viewport


async def check_accessible(page: Page) -> None:
    """The page fits its window, has no serious fault for assistive technology, and nothing of a foreign text acts."""
    assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, page.url
    found = await Axe().run(page)
    serious = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical")]
    assert not [(v["id"], [node["html"] for node in v["nodes"][:3]]) for v in serious], page.url
    await check_inert(page)


async def check_inert(page: Page) -> None:
    assert await page.locator(FOREIGN).count() == 0, page.url
    assert "\u202e" not in await page.locator("main").inner_text()
    assert "owned" not in await page.title() or "<script>" in await page.title()


async def test_a_newcomer_finds_why_an_episode_failed_and_what_the_model_saw(page: Page) -> None:
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


async def test_hostile_content_is_shown_and_does_nothing(page: Page, runs: list[Config]) -> None:
    number = await open_episode(page, "owned")
    assert "owned'</script>" in await page.locator("h1").inner_text()
    assert "\\u202e" in await page.locator("main").inner_text()
    for summary in await page.locator("section.step summary").all():
        await summary.click()
    await check_inert(page)
    for place in (f"group/{number}", f"task/{number}", "episodes", "", "episode/999999", "nothing", "compare"):
        await go(page, f"#/{place}")
        await check_inert(page)
    assert "owned'<|script>" in await page.locator("main").inner_text()
    visible = re.sub("[\x1b\u202c\u202e]", lambda match: f"\\u{ord(match[0]):04x}", HOSTILE_NAME).strip()
    await page.get_by_role("link", name=visible).first.click()
    await page.get_by_text("update 20 of").wait_for()
    assert await page.locator("#run-name").inner_text() == visible
    await check_inert(page)


async def test_runs_are_compared_with_the_keyboard_alone(page: Page) -> None:
    await page.get_by_role("link", name="Compare").press("Enter")
    await page.get_by_role("img", name="Reward of trained episodes: mean over update 1 to 30").wait_for()
    lines = page.locator("figure").first.locator("polyline")
    styles = [await each.get_attribute("class") for each in await lines.all()]
    assert len(styles) == len(set(styles)) == 8, "each run has a combination of colour and dashes of its own"
    await page.get_by_label("trained trajectories").press("Space")
    await page.get_by_role("img", name="episodes: mean over trained trajectories 62 to 1,860").wait_for()
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


async def test_the_pages_are_accessible_and_fit(page: Page) -> None:
    async for viewport in looks(page):
        number = await open_episode(page, "click")
        others = ("compare", "episodes?sort=steps&outcome=success", f"group/{number}")
        for place in ("", f"episode/{number}", *(others if viewport["width"] < 500 else ())):
            await go(page, f"#/{place}")
            await check_accessible(page)


# -- rollouts while workers change their states -------------------------------------------------------


def open_rollouts(worker: Worker, tickets: range) -> None:
    """Two rollouts of each ticket: one acts, one waits for the model."""
    for ticket in tickets:
        for index, state in enumerate((ACTING, WAITING_FOR_MODEL)):
            worker.open(replace(episode(ticket, index, steps=2), group_size=2)).set(state)


async def test_a_click_opens_an_episode_that_grows_until_it_ends(page: Page, workers: list[Worker]) -> None:
    live = workers[0].open(episode(7, 0, steps=1))
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
    workers[0].table.close("training", 7)
    await page.get_by_text("This rollout has ended.").wait_for()


async def test_rollouts_are_found_by_keyboard_filtered_and_followed(page: Page, workers: list[Worker]) -> None:
    first, second = workers
    open_rollouts(first, range(15))
    open_rollouts(second, range(15, 18))
    await page.get_by_role("link", name="Rollouts").click()
    await page.get_by_text("36 of 36 rollouts shown, of 2 workers").wait_for()
    await page.locator(".wall").focus()
    for key, words in (
        ("Home", "rollout-0, ticket 0, episode 1"), ("ArrowRight", "ticket 0, episode 2"),
        ("ArrowDown", "rollout-1, ticket 15, episode 2"), ("End", "ticket 17, episode 2"),
        ("ArrowUp", "ticket 2, episode 2"),
    ):  # fmt: skip
        await page.keyboard.press(key)
        await page.locator("#active-rollout", has_text=words).wait_for(state="attached")  # what a screen reader says
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
    attack = replace(hostile(70), outcome="failure", end_reason="answer", worker="")
    first.open(attack).finish("failure")
    first.open(replace(attack, ticket=80)).finish(HOSTILE)
    async for _ in looks(page):
        for by in ("site", "state"):
            await go(page, f"#/rollouts?by={by}")
            await page.get_by_text("36 of 36 rollouts shown").wait_for()
            await page.locator(".wall").focus()
            await page.keyboard.press("End")
        await check_accessible(page)
        await go(page, "#/rollout/rollout-0/training-70-0")
        await page.locator("section.step").nth(1).wait_for()
        assert "owned'</script>" in await page.locator("h1").inner_text()
        await check_accessible(page)
