"""MiniWoB++ as a source: the task of a ticket, and its page."""

from __future__ import annotations

import io
import re
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import LatencyConfig, TasksConfig, tasks_config
from megatron_webrl.tasks.latency import response_delay
from megatron_webrl.tasks.miniwob import UNSUPPORTED_ENVIRONMENTS, MiniWobTaskSource, all_environments, pages_folder
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.scripted_policies import next_scripted_action
from megatron_webrl.tasks.server import FolderServer
from megatron_webrl.tasks.source import HELD_OUT_SEEDS, TRAINING_SEEDS, training_page_seed
from megatron_webrl.types import Action, Task


def miniwob_task(environment: str, seed: int) -> Task:
    return Task(id=f"miniwob/{environment}/{seed}", source="miniwob", environment=environment, seed=seed, max_steps=5)


def pool_on(source: MiniWobTaskSource, width: int = 160, height: int = 210) -> BrowserPool:
    return BrowserPool(BrowserConfig(width=width, height=height, screenshot="png"), {"miniwob": source}, 1, 20.0)


def test_an_unknown_environment_is_refused_with_similar_names() -> None:
    with pytest.raises(ConfigError, match=r"no 'click-buton' among its \d+ environments; near: .*click-button"):
        make_source(tasks_config(environments=["click-test", "click-buton"]))
    with pytest.raises(ConfigError, match="environments is empty"):
        make_source(tasks_config(environments=[]))


def test_every_page_of_the_package_is_supported_or_listed_as_unsupported() -> None:
    registered = (pages_folder().parent / "registration.py").read_text()
    names = set(all_environments())
    assert set(re.findall(r'id="miniwob/([\w.-]+)-v1"', registered)) <= names
    assert {page.stem for page in (pages_folder() / "miniwob").glob("*.html")} <= names | set(UNSUPPORTED_ENVIRONMENTS)
    assert len(names) == 133
    with pytest.raises(ConfigError, match="hover-shape cannot be used: its page never gives a reward"):
        make_source(tasks_config(environments=["click-test", "hover-shape"]))


def test_the_task_of_a_ticket_depends_on_seed_and_ticket_alone() -> None:
    assert training_page_seed(0, 0) == 817986456  # must stay so on every machine: a resumed run relies on it
    with (
        MiniWobTaskSource(["click-test", "click-tab"], TasksConfig(max_steps=4)) as one,
        MiniWobTaskSource(["click-test", "click-tab"], TasksConfig(max_steps=4)) as two,
    ):
        tasks = [one.training_task(7, ticket) for ticket in range(200)]
        assert tasks == [two.training_task(7, ticket) for ticket in range(200)]
        assert tasks != [two.training_task(8, ticket) for ticket in range(200)]
    assert len({task.id for task in tasks}) == 200
    assert {task.max_steps for task in tasks} == {4}


def test_evaluation_never_uses_a_training_page() -> None:
    with MiniWobTaskSource(["click-test", "click-tab"], TasksConfig(max_steps=4)) as source:
        held_out = [source.held_out_task(index) for index in range(50)]
        assert all(source.training_task(0, ticket).seed in TRAINING_SEEDS for ticket in range(500))
    assert all(task.seed in HELD_OUT_SEEDS for task in held_out)
    assert not set(TRAINING_SEEDS[:: 2**20]) & set(HELD_OUT_SEEDS[:: 2**20])
    assert TRAINING_SEEDS.stop <= HELD_OUT_SEEDS.start
    assert Counter(task.environment for task in held_out) == {"click-test": 25, "click-tab": 25}
    assert len({task.id for task in held_out}) == 50


async def test_the_same_seed_gives_the_same_page_in_every_server_and_browser() -> None:
    seen = []
    for seed in (5, 5, 6):
        with MiniWobTaskSource(["click-color"], TasksConfig(max_steps=4)) as source:
            async with pool_on(source) as fleet, fleet.session() as session:
                seen.append(await session.reset(miniwob_task("click-color", seed)))
    assert seen[0] == seen[1]
    assert seen[0].instruction != seen[2].instruction
    assert seen[0].url == "http://miniwob.localhost/miniwob/click-color.html"


async def test_the_screenshot_shows_the_task_area_and_never_the_reward() -> None:
    with MiniWobTaskSource(["click-test"], TasksConfig(max_steps=4)) as source:
        async with pool_on(source, width=400) as fleet, fleet.session() as session:
            first = await session.reset(miniwob_task("click-test", 1))
            last = await session.step(await next_scripted_action(session.page, "click-test"))
    assert (last.done, last.reward is not None and last.reward > 0) == (True, True)
    for screenshot in (first.screenshot, last.screenshot):
        image = Image.open(io.BytesIO(screenshot)).convert("RGB")
        assert image.getpixel((150, 5)) == (255, 255, 0)  # the instruction's background
        # Beside the task area there would be the panel with the last reward; there is only background.
        assert image.crop((160, 0, 400, 210)).getcolors() == [(240 * 210, (0x55, 0x55, 0x55))]


async def test_a_wrong_action_ends_without_a_positive_reward() -> None:
    with MiniWobTaskSource(["click-test-2"], TasksConfig(max_steps=4)) as source:
        async with pool_on(source) as fleet, fleet.session() as session:
            await session.reset(miniwob_task("click-test-2", 1))
            box = await session.page.locator("#subbtn2").bounding_box()
            assert box is not None
            middle = (int((box["x"] + 20) / 160 * 1000), int((box["y"] + 20) / 210 * 1000))
            seen = await session.step(Action("left_click", coordinate=middle))
    assert (seen.done, seen.reward) == (True, -1.0)


async def test_reloading_the_page_leaves_the_episode_and_earns_nothing() -> None:
    with MiniWobTaskSource(["click-test"], TasksConfig(max_steps=4)) as source:
        async with pool_on(source) as fleet, fleet.session() as session:
            first = await session.reset(miniwob_task("click-test", 1))
            await session.step(Action("navigate", url=first.url))
            await session.step(Action("left_click", coordinate=(500, 500)))  # the page's own START
            seen = await session.step(await next_scripted_action(session.page, "click-test"))
    assert (seen.done, seen.reward, seen.error) == (False, None, None)


async def test_pages_answer_after_the_simulated_response_time() -> None:
    settings = LatencyConfig(median_seconds=0.4, sigma=0.5)
    with MiniWobTaskSource(["click-test"], TasksConfig(max_steps=4, latency=settings)) as source:
        async with pool_on(source) as fleet, fleet.session() as session:
            for number in range(2):  # a reused page
                seen = [await session.reset(miniwob_task("click-test", 1))]
                seen.append(await session.step(await next_scripted_action(session.page, "click-test")))
                for request, each in enumerate(seen):
                    assert each.seconds.capturing >= response_delay(settings, f"click-test/1/{number}", request)


def test_the_server_serves_nothing_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "page.html").write_text("page")
    (tmp_path / "secret").write_text("secret")
    server = FolderServer(tmp_path / "inside")
    address = server.address
    with urllib.request.urlopen(f"http://{address}/page.html?query", timeout=5) as answer:
        assert (answer.read(), answer.headers["Content-Type"]) == (b"page", "text/html; charset=utf-8")
    for path in ("../secret", "%2e%2e/secret", "", "inside/page.html"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address}/{path}", timeout=5)
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/page.html", timeout=5)
