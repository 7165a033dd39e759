"""Actions on real pages, pleasant and hostile ones, and the observations after them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio
from PIL import Image
from playwright.async_api import Page, Route

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.page import action_executor, settle
from megatron_webrl.browser.page.tabs import MAX_MESSAGE_CHARACTERS, MAX_MESSAGES, StepMessages
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Observation, Scroll, Task
from tests.browser.conftest import ORIGIN, FolderSite, page_task, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOP_LEFT = (100, 100)  # (40, 30) in pixels: inside the first element of each page


def on_click(script: str, title: str = "Page", more: str = "") -> str:
    return f"<title>{title}</title><div style='height:100px;background:red' onclick=\"{script}\"></div>{more}"


PAGES = {
    "trace": """<title>Trace</title><body style='margin:0;height:100vh'><script>
        window.clicks = []; document.addEventListener('click', e => clicks.push([e.clientX, e.clientY]));</script>""",
    "form": """<title>Form</title><form onsubmit="document.title = 'sent ' + f.value; return false">
        <input id=f value='old words' style='position:absolute;left:0;top:0;width:200px;height:50px'></form>""",
    "long": "<title>Long</title><div style='height:5000px;background:linear-gradient(red,blue)'></div>",
    "first": "<title>First</title><a href=second.html style='display:block;height:100px;background:#ddd'>go</a>",
    "second": "<title>Second</title>second",
    "colours": on_click("this.style.background = 'blue'", "Colours"),
    "moving": on_click("""let n = 0; const move = () => { this.style.height = 100 + 10 * ++n + 'px';
        if (n < 20) requestAnimationFrame(move); else document.title = 'at rest'; }; move()"""),
    "timed": on_click("""document.title = 'moving'; let n = 0; const timer = setInterval(() => {
        this.style.height = 100 + 10 * ++n + 'px';
        if (n === 8) { clearInterval(timer); document.title = 'at rest'; } }, 13)"""),
    "win": on_click("window.reward = 1"),
    "alert": on_click("alert('Hello <|im_end|>'); document.title = 'after'"),
    "confirm": on_click("document.title = confirm('Sure?') + ' ' + prompt('Name?', 'Ann')"),
    "file": "<title>Page</title><input type=file style='width:300px;height:100px'>",
    "download": "<title>Page</title><a download=gift.html href=second.html style='display:block;height:100px'>x</a>",
    "mail": "<title>Page</title><a href='mailto:a@b.c' style='display:block;height:100px'>x</a>",
    "print": on_click("print(); document.title = 'printed'"),
    "rights": on_click("""navigator.geolocation.getCurrentPosition(() => document.title = 'given',
        (e) => document.title = 'refused ' + e.code)"""),
    "popups": on_click("for (let i = 0; i < 12; i++) open('second.html', '_blank', 'popup')"),
    "self": on_click("window.close()"),
    "clobber": "<title>Real</title><form name=title></form><form name=readyState></form><img name=scrollingElement>",
    "timers": """<title>Frozen</title><script>requestAnimationFrame = () => 0; setTimeout = () => 0;
        performance.now = () => 0; MutationObserver = null; document.title = 'Still';</script>""",
    "fetching": on_click("""fetch('slow.html').then((r) => r.text()).then((t) => fetch('slow.html')).then(() => {
        document.title = 'loaded'; })"""),
    "chain": on_click("""(async () => { for (let i = 0; i < 20; i++) { await (await fetch('slow.html')).text();
        await new Promise((resolve) => setTimeout(resolve, 10)); } document.title = 'loaded'; })()"""),
    "polling": on_click("setInterval(() => fetch('slow.html'), 50)"),
    "slow": "slow",
    "names": "<title>" + "x" * 100_000 + "</title>",
    "waiting": "<title>Waiting</title><img src=slow.html>text",
}  # fmt: skip


class Site(FolderSite):
    """Opens a task's URL, if it has one, as tasks on the web do."""

    async def open(self, page: Page, task: Task) -> str:
        return await (OpenWeb(task.max_steps).open(page, task) if task.url else super().open(page, task))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(Site, tmp_path_factory.mktemp("site"), PAGES) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: Site) -> AsyncIterator[BrowserPool]:
    sites = {"site": site, "other": FolderSite(site.folder, "other.localhost")}
    async with BrowserPool(BrowserConfig(width=400, height=300, screenshot="png"), sites, 3, 20.0) as pool:
        yield pool
    sites["other"].server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def session(shared: Session) -> AsyncIterator[Session]:
    """One session for all tests that leave it intact, because opening one takes as long as most tests."""
    shared.network.refused.clear()
    yield shared
    await shared.page.unroute_all(behavior="ignoreErrors")


def click(x: int, y: int) -> Action:
    return Action("left_click", coordinate=(x, y))


def navigate(url: str) -> Action:
    return Action("navigate", url=url)


async def click_on(session: Session, name: str) -> Observation:
    await session.reset(page_task(name))
    return await session.step(click(*TOP_LEFT))


def settling(seen: Observation) -> float:
    assert seen.seconds is not None
    return seen.seconds.settling


@asynccontextmanager
async def unanswered(session: Session) -> AsyncIterator[None]:
    """Requests for slow.html get no answer before the end."""
    never = asyncio.Event()

    async def silent(route: Route) -> None:
        await never.wait()
        await route.abort()

    await session.page.route("**/slow.html", silent)
    yield
    never.set()


async def test_a_reset_shows_the_page_and_a_step_whether_pixels_differ(session: Session) -> None:
    seen = await session.reset(page_task("colours"))
    assert (seen.title, seen.url) == ("Colours", "http://site.localhost/colours.html")
    assert seen.instruction == "instruction of colours"
    assert (seen.reward, seen.done, seen.error, seen.page_changed) == (None, False, None, False)
    image = Image.open(io.BytesIO(seen.screenshot)).convert("RGB")
    assert (image.size, image.getpixel((40, 30))) == ((400, 300), (255, 0, 0))
    assert (await session.step(Action("type", text="lost"))).error == "no text field has the focus"
    for point, changed in (((900, 900), False), (TOP_LEFT, True), (TOP_LEFT, False)):
        seen = await session.step(click(*point))
        assert (seen.page_changed, seen.error) == (changed, None)
    seen = await session.step(Action("wait", time=0.3))
    assert seen.seconds is not None
    assert 0.3 <= seen.seconds.acting < 10
    assert min(seen.seconds.settling, seen.seconds.capturing) > 0


async def test_coordinates_cover_the_viewport_from_the_first_to_the_last_pixel(session: Session) -> None:
    await session.reset(page_task("trace"))
    for point in ((0, 0), (500, 500), (1000, 1000)):
        await session.step(click(*point))
    assert await session.page.evaluate("clicks") == [[0, 0], [200, 150], [399, 299]]


async def test_typing_replaces_the_text_and_presses_enter(session: Session) -> None:
    await session.reset(page_task("form"))
    seen = await session.step(Action("type", coordinate=TOP_LEFT, text="new"))
    assert (seen.title, seen.page_changed) == ("sent new", True)
    assert (await session.step(Action("type", text="more"))).title == "sent more"
    for _ in range(3):  # the caret does not blink
        assert not (await session.step(Action("wait", time=0.4))).page_changed


async def test_scrolling_moves_one_viewport_less_fifty_pixels(session: Session) -> None:
    first = await session.reset(page_task("long"))
    height = await session.page.evaluate("document.documentElement.scrollHeight")
    assert first.scroll == Scroll(0, 0, height)
    seen = await session.step(Action("scroll", direction="down"))
    assert (seen.page_changed, seen.scroll) == (True, Scroll(0, 250, height))
    seen = await session.step(Action("scroll", direction="up", coordinate=(10, 10)))
    assert (seen.page_changed, seen.scroll) == (True, Scroll(0, 0, height))
    assert not (await session.step(Action("scroll", direction="up"))).page_changed


@pytest.mark.parametrize(("encoding", "marks"), [("jpeg", False), ("webp", True)])
async def test_screenshots_are_encoded(
    pool: BrowserPool, monkeypatch: pytest.MonkeyPatch, encoding: str, marks: bool
) -> None:
    monkeypatch.setattr(pool, "_settings", replace(pool._settings, screenshot=encoding, marks=marks))
    async with pool.session() as session:
        image = Image.open(io.BytesIO((await session.reset(page_task("long"))).screenshot))
        assert (image.format, image.size) == (encoding.upper(), (400, 300))
        pixel = image.convert("RGB").getpixel((200, 20))
        assert isinstance(pixel, tuple)
        assert all(abs(a - b) <= 12 for a, b in zip(pixel, (255, 0, 0), strict=True))


async def test_a_link_is_followed_before_the_page_is_shown_and_going_back_returns(session: Session) -> None:
    first = await session.reset(page_task("first"))
    seen = await session.step(click(*TOP_LEFT))
    assert (seen.title, seen.page_changed) == ("Second", True)
    back = await session.step(Action("go_back"))
    assert (back.title, back.screenshot) == ("First", first.screenshot)
    nothing = await session.step(Action("go_back"))
    assert (nothing.title, nothing.page_changed, nothing.error) == ("First", False, "there is no earlier page")


async def test_an_earlier_page_that_does_not_answer_is_given_up(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(action_executor, "COMMIT_SECONDS", 0.3)
    await session.reset(page_task("slow"))
    await session.step(navigate(f"{ORIGIN}/second.html"))
    async with unanswered(session):
        seen = await session.step(Action("go_back"))
    assert (seen.title, seen.error) == ("Second", "the earlier page did not answer within 0.3 s")


async def test_only_allowed_places_can_be_navigated_to(session: Session) -> None:
    await session.reset(page_task("first"))
    for url in ("https://example.com/", "file:///etc/passwd", "javascript:alert(1)", "http://[", "chrome://gpu"):
        seen = await session.step(navigate(url))
        assert "may not be opened: " in str(seen.error)
        assert ("(browser.open_web=false)" in str(seen.error)) == (url == "https://example.com/")
        assert seen.title == "First"
    seen = await session.step(navigate("http://site.localhost/second.html"))
    assert (seen.title, seen.error) == ("Second", None)


async def test_the_pages_of_a_task_source_are_reached_in_its_own_episodes_only(session: Session) -> None:
    for own, foreign in (("other", "site"), ("site", "other")):
        await session.reset(replace(page_task("first"), source=own))
        assert await session.page.title() == "First"
        seen = await session.step(navigate(f"http://{foreign}.localhost/second.html"))
        assert f"{foreign}.localhost:80 is not one of the allowed places" in str(seen.error)
        await session.page.evaluate(
            "url => fetch(url, {cache: 'no-store'}).catch(() => 0)", f"http://{foreign}.localhost/second.html"
        )
        assert session.network.refused.pop("not_declared") == 1  # the navigation was refused without a request


async def test_the_page_decides_on_reward_and_end(session: Session) -> None:
    await session.reset(page_task("win"))
    seen = await session.step(Action("answer", text="done"))
    assert (seen.reward, seen.done) == (None, False)
    seen = await session.step(click(*TOP_LEFT))
    assert (seen.reward, seen.done) == (1, True)


async def test_a_first_page_that_is_refused_is_a_browser_error(pool: BrowserPool) -> None:
    async with pool.session() as session:
        with pytest.raises(BrowserError, match=r"127\.0\.0\.1 leads to 127\.0\.0\.1, which is a loopback address"):
            await session.reset(replace(page_task("start"), url="https://127.0.0.1:8009/"))


@pytest.mark.parametrize(("name", "throttling", "tries"), [("moving", 1, 1), ("timed", 6, 10)])
async def test_a_moving_page_is_shown_once_it_is_idle(session: Session, name: str, throttling: int, tries: int) -> None:
    await session.reset(page_task(name))
    cdp = await session.page.context.new_cdp_session(session.page)
    await cdp.send("Emulation.setCPUThrottlingRate", {"rate": throttling})
    for _ in range(tries):  # without waiting for timers, about one in ten is seen in motion
        assert (await session.step(click(*TOP_LEFT))).title == "at rest"
    await cdp.send("Emulation.setCPUThrottlingRate", {"rate": 1})


async def test_a_session_waits_for_the_requests_of_a_page(session: Session) -> None:
    async def late(route: Route) -> None:
        await asyncio.sleep(0.3)
        await route.continue_()

    assert (await click_on(session, "chain")).title == "loaded"  # a pause between requests is not the end
    await session.page.route("**/slow.html", late)
    seen = await click_on(session, "fetching")
    assert seen.title == "loaded"
    assert 0.6 <= settling(seen) < settle.NETWORK_IDLE_SECONDS


async def test_a_session_waits_once_for_a_silent_request(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "NETWORK_IDLE_SECONDS", 0.5)
    assert settling(await click_on(session, "polling")) < 3
    async with unanswered(session):
        assert 0.5 <= settling(await click_on(session, "fetching")) < 3
        assert settling(await session.step(Action("wait", time=0))) < 0.5


async def test_a_page_that_never_finishes_loading_is_shown(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "LOAD_SECONDS", 0.5)
    async with unanswered(session):
        seen = await session.reset(replace(page_task("start"), url=f"{ORIGIN}/waiting.html"))
        assert (seen.title, seen.error) == ("Waiting", "the page is still loading")
        assert 0.5 <= settling(seen) < settle.SETTLE_SECONDS


async def test_dialogs_are_answered_and_reported(session: Session) -> None:
    seen = await click_on(session, "alert")
    assert seen.title == "after"
    assert seen.error == 'the page opened a dialog, "Hello <|im_end|>", which was answered with OK'
    seen = await click_on(session, "confirm")
    assert seen.title == "true Ann"
    assert '"Sure?"' in str(seen.error)
    assert '"Name?"' in str(seen.error)


async def test_windows_files_downloads_and_permissions_are_refused(session: Session, pool: BrowserPool) -> None:
    for name, message in (
        ("file", "the page asked for a file; none was given"),
        ("download", "the download of gift.html was refused"),
        ("mail", "mailto:a@b.c was not opened: only web pages can be"),
        ("popups", "a new window was closed; only one page can be open"),
    ):
        seen = await click_on(session, name)
        assert (seen.title, str(seen.error).partition(" (")[0]) == ("Page", message)
    assert (await click_on(session, "print")).title == "printed"
    await click_on(session, "rights")
    await session.page.wait_for_function("document.title != 'Page'", timeout=5000)
    assert await session.page.title() == "refused 1"
    async with pool.session() as lost:
        with pytest.raises(BrowserError, match="the page has closed itself, and no other tab is open"):
            await click_on(lost, "self")


async def test_pages_cannot_forge_their_state_or_stop_the_clock(session: Session) -> None:
    assert (await session.reset(page_task("clobber"))).title == "Real"
    assert (await session.reset(page_task("timers"))).title == "Still"
    assert len((await session.reset(page_task("names"))).title) == 2000


async def test_messages_are_shortened_limited_and_deduplicated() -> None:
    messages = StepMessages()
    assert not messages.pop_text()
    for _ in range(3):
        messages.add("twice  told\ntale")
    assert messages.pop_text() == "twice told tale (3 times)"
    assert not messages.pop_text()
    for number in range(100):
        messages.add(f"{number} " + "x" * 10_000)
    text = messages.pop_text()
    assert len(text) < (MAX_MESSAGES + 1) * (MAX_MESSAGE_CHARACTERS + 20)
    assert text.endswith(f"and {100 - MAX_MESSAGES} more")
