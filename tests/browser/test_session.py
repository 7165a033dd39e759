"""Actions on real pages, and the observations after them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError, BrowserTimeout, PageCrashed
from megatron_webrl.browser.session import Session
from megatron_webrl.tasks.server import FolderServer
from megatron_webrl.types import Action, Observation, Scroll
from tests.browser.conftest import FolderSite, page_task, pool_on

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOP_LEFT = (100, 100)  # (40, 30) in pixels: inside the first element of each page


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: FolderSite) -> AsyncIterator[BrowserPool]:
    async with pool_on(site) as pool:
        yield pool


@asynccontextmanager
async def opened(pool: BrowserPool, name: str) -> AsyncIterator[tuple[Session, Observation]]:
    """A session with one of the site's pages open."""
    async with pool.session() as session:
        yield session, await session.reset(page_task(name))


def click(x: int, y: int) -> Action:
    return Action("left_click", coordinate=(x, y))


async def test_a_reset_shows_the_page_with_its_instruction(pool: BrowserPool) -> None:
    async with opened(pool, "colours") as (_, seen):
        assert (seen.title, seen.url) == ("Colours", "http://site.localhost/colours.html")
        assert seen.instruction == "instruction of colours"
        assert (seen.reward, seen.done, seen.error, seen.page_changed) == (None, False, None, False)
        image = Image.open(io.BytesIO(seen.screenshot)).convert("RGB")
        assert image.size == (400, 300)
        assert image.getpixel((40, 30)) == (255, 0, 0)


async def test_coordinates_cover_the_viewport_from_the_first_to_the_last_pixel(pool: BrowserPool) -> None:
    async with opened(pool, "trace") as (session, _):
        for point in ((0, 0), (500, 500), (1000, 1000)):
            await session.step(click(*point))
        assert await session.page.evaluate("clicks") == [[0, 0], [200, 150], [399, 299]]


async def test_typing_replaces_the_text_and_presses_enter(pool: BrowserPool) -> None:
    async with opened(pool, "form") as (session, _):
        seen = await session.step(Action("type", coordinate=TOP_LEFT, text="new"))
        assert seen.title == "sent new"
        assert seen.page_changed
        again = await session.step(Action("type", text="more"))
        assert again.title == "sent more"


async def test_typing_without_a_focused_field_is_reported_and_the_episode_continues(pool: BrowserPool) -> None:
    async with opened(pool, "colours") as (session, _):
        seen = await session.step(Action("type", text="lost"))
        assert seen.error == "no text field has the focus"
        assert (await session.step(click(*TOP_LEFT))).error is None


async def test_scrolling_moves_one_viewport_less_fifty_pixels(pool: BrowserPool) -> None:
    async with opened(pool, "long") as (session, _):
        seen = await session.step(Action("scroll", direction="down"))
        assert seen.page_changed
        assert await session.page.evaluate("scrollY") == 250
        await session.step(Action("scroll", direction="up", coordinate=(10, 10)))
        assert await session.page.evaluate("scrollY") == 0
        assert not (await session.step(Action("scroll", direction="up"))).page_changed


async def test_an_observation_has_the_scroll_position(pool: BrowserPool) -> None:
    async with opened(pool, "long") as (session, first):
        height = await session.page.evaluate("document.documentElement.scrollHeight")
        assert first.scroll == Scroll(0, 0, height)
        assert (await session.step(Action("scroll", direction="down"))).scroll == Scroll(0, 250, height)


async def test_a_step_reports_seconds_of_acting_settling_and_capturing(pool: BrowserPool) -> None:
    async with opened(pool, "first") as (session, _):
        seen = await session.step(Action("wait", time=0.3))
        assert seen.seconds is not None
        assert 0.3 <= seen.seconds.acting < 10
        assert min(seen.seconds.settling, seen.seconds.capturing) > 0


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("encoding", ["jpeg", "webp"])
async def test_screenshots_have_the_configured_encoding(site: FolderSite, encoding: str, marks: bool) -> None:
    async with pool_on(site, screenshot=encoding, marks=marks) as pool, opened(pool, "long") as (_, seen):
        image = Image.open(io.BytesIO(seen.screenshot))
        assert (image.format, image.size) == (encoding.upper(), (400, 300))
        pixel = image.convert("RGB").getpixel((200, 20))
        assert isinstance(pixel, tuple)
        assert all(abs(a - b) <= 12 for a, b in zip(pixel, (255, 0, 0), strict=True))


async def test_a_link_is_followed_before_the_page_is_shown_and_going_back_returns(pool: BrowserPool) -> None:
    async with opened(pool, "first") as (session, first):
        seen = await session.step(click(*TOP_LEFT))
        assert (seen.title, seen.page_changed) == ("Second", True)
        back = await session.step(Action("go_back"))
        assert (back.title, back.screenshot) == ("First", first.screenshot)
        nothing = await session.step(Action("go_back"))
        assert nothing.error == "there is no earlier page"
        assert (nothing.title, nothing.page_changed) == ("First", False)


async def test_only_allowed_places_can_be_navigated_to(pool: BrowserPool) -> None:
    async with opened(pool, "first") as (session, _):
        for url in ("https://example.com/", "file:///etc/passwd", "javascript:alert(1)", "http://[", "chrome://gpu"):
            seen = await session.step(Action("navigate", url=url))
            assert "may not be opened: " in str(seen.error)
            assert seen.title == "First"
        seen = await session.step(Action("navigate", url="https://example.com/"))
        assert str(seen.error).endswith(
            "example.com:443 is not one of the allowed places: site.localhost:80 (browser.open_web=false)"
        )
        seen = await session.step(Action("navigate", url="http://site.localhost/second.html"))
        assert (seen.title, seen.error) == ("Second", None)


async def test_pages_reach_no_other_origin(
    pool: BrowserPool, tmp_path_factory: pytest.TempPathFactory, reached: list[object]
) -> None:
    secret: Path = tmp_path_factory.mktemp("other") / "secret.html"
    secret.write_text("secret")
    other = FolderServer(secret.parent)
    script = f"""async () => {{
        const tries = [fetch('http://{other.address}/secret.html', {{mode: 'no-cors'}}),
                       fetch('http://other.localhost/secret.html', {{mode: 'no-cors'}})];
        const socket = new WebSocket('ws://{other.address}/secret.html');
        const closed = new Promise(done => {{ socket.onclose = () => done('closed'); }});
        await Promise.allSettled(tries);
        return await closed;
    }}"""
    async with opened(pool, "first") as (session, _):
        assert await session.page.evaluate(script) == "closed"
        await session.page.evaluate(f"() => {{ location.href = 'http://{other.address}/secret.html'; }}")
        seen = await session.step(Action("wait", time=0))
        assert seen.error == f"{other.address.split(':')[0]} leads to 127.0.0.1, which is a loopback address"
        assert seen.title == "Not reachable"
        assert session.network.refused == {"loopback": 3, "not_declared": 1}
        assert (await session.step(Action("go_back"))).title == "First"
    assert other._server is not None
    assert other._server not in reached
    other.close()


async def test_page_changed_means_that_pixels_differ(pool: BrowserPool) -> None:
    async with opened(pool, "colours") as (session, _):
        assert not (await session.step(click(900, 900))).page_changed
        assert (await session.step(click(*TOP_LEFT))).page_changed
        assert not (await session.step(click(*TOP_LEFT))).page_changed


async def test_a_focused_field_looks_the_same_at_any_time(pool: BrowserPool) -> None:
    async with opened(pool, "form") as (session, _):
        await session.step(click(*TOP_LEFT))
        for _ in range(3):
            assert not (await session.step(Action("wait", time=0.4))).page_changed


async def test_a_moving_page_is_shown_once_it_is_idle(pool: BrowserPool) -> None:
    async with opened(pool, "moving") as (session, _):
        assert (await session.step(click(*TOP_LEFT))).title == "at rest"


async def test_a_page_moved_by_timers_is_shown_once_it_is_idle_on_a_slow_machine(pool: BrowserPool) -> None:
    async with opened(pool, "timed") as (session, _):
        cdp = await session.page.context.new_cdp_session(session.page)
        await cdp.send("Emulation.setCPUThrottlingRate", {"rate": 6})
        for _ in range(30):  # without waiting for timers, about one in ten is seen in motion
            assert (await session.step(click(*TOP_LEFT))).title == "at rest"


async def test_the_page_decides_on_reward_and_end(pool: BrowserPool) -> None:
    async with opened(pool, "win") as (session, _):
        seen = await session.step(Action("answer", text="done"))
        assert (seen.reward, seen.done) == (None, False)
        seen = await session.step(click(*TOP_LEFT))
        assert (seen.reward, seen.done) == (1, True)


async def test_a_second_window_is_closed_and_reported(pool: BrowserPool) -> None:
    async with opened(pool, "popup") as (session, _):
        seen = await session.step(click(*TOP_LEFT))
        assert seen.title == "Popup"
        assert seen.error == "a new window was closed; only one page can be open"


async def test_a_crashed_page_raises_an_error_that_names_it(pool: BrowserPool) -> None:
    async with opened(pool, "first") as (session, _):
        cdp = await session.page.context.new_cdp_session(session.page)
        crash = asyncio.ensure_future(cdp.send("Page.crash"))
        with pytest.raises(PageCrashed, match="renderer process has crashed"):
            await session.step(Action("wait", time=5))
        crash.cancel()
        await asyncio.gather(crash, return_exceptions=True)


async def test_an_operation_over_its_limit_raises_an_error_that_names_it(site: FolderSite) -> None:
    async with pool_on(site, step_seconds=2.0) as pool, pool.session() as session:
        await session.reset(page_task("first"))
        with pytest.raises(BrowserTimeout, match=r"wait took more than 2.0 s \(rollout.operation_timeout_seconds\)"):
            await session.step(Action("wait", time=5))


async def test_a_page_that_does_not_open_is_a_browser_error(tmp_path: Path) -> None:
    gone = FolderSite(tmp_path)
    assert gone.addresses  # the first look at them starts the server
    gone.server.close()
    async with pool_on(gone) as pool, pool.session() as session:
        with pytest.raises(
            BrowserError, match=r"reset of site/first failed: .*; site\.localhost:80 cannot be reached: "
        ):
            await session.reset(page_task("first"))
