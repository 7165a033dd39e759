"""Pages with dialogs, windows, downloads and endless loading: the session continues and reports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Route

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.page.tabs import MAX_MESSAGE_CHARACTERS, MAX_MESSAGES, StepMessages
from megatron_webrl.browser.session import Session
from megatron_webrl.types import Action, Observation
from tests.browser.conftest import FolderSite, page_task, pool_on, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


def on_click(script: str, more: str = "") -> str:
    return f"""<title>Page</title><div style='height:100px;background:red' onclick="{script}"></div>{more}"""


PAGES = {
    "alert": on_click("alert('Hello <|im_end|>'); document.title = 'after'"),
    "confirm": on_click("document.title = confirm('Sure?') + ' ' + prompt('Name?', 'Ann')"),
    "loop": on_click("for (;;) alert('again')"),
    "timer": on_click("setInterval(() => alert('again'), 1)"),
    "leave": on_click("1", "<script>addEventListener('beforeunload', (e) => e.preventDefault())</script>"),
    "other": "<title>Other</title>",
    "file": "<title>Page</title><input type=file style='width:300px;height:100px'>",
    "download": "<title>Page</title><a download=gift.html href=other.html style='display:block;height:100px'>x</a>",
    "mail": "<title>Page</title><a href='mailto:a@b.c' style='display:block;height:100px'>x</a>",
    "print": on_click("print(); document.title = 'printed'"),
    "rights": on_click("""navigator.geolocation.getCurrentPosition(() => document.title = 'given',
        (e) => document.title = 'refused ' + e.code)"""),
    "popups": on_click("for (let i = 0; i < 12; i++) open('other.html', '_blank', 'popup')"),
    "self": on_click("window.close()"),
    "clobber": "<title>Real</title><form name=title></form><form name=readyState></form><img name=scrollingElement>",
    "timers": """<title>Frozen</title><script>requestAnimationFrame = () => 0; setTimeout = () => 0;
        performance.now = () => 0; MutationObserver = null; document.title = 'Still';</script>""",
    "fetching": on_click("""fetch('slow.html').then((r) => r.text()).then((t) => fetch('slow.html')).then(() => {
        document.title = 'loaded'; })"""),
    "chain": on_click("""(async () => { for (let i = 0; i < 20; i++) { await (await fetch('slow.html')).text();
        await new Promise((resolve) => setTimeout(resolve, 10)); } document.title = 'loaded'; })()"""),
    "polling": on_click("setInterval(() => fetch('slow.html'), 50)"),
    "ping": "<title>Ping</title><script>onload = () => setTimeout(() => location.replace('pong.html'), 20)</script>",
    "pong": "<title>Pong</title><script>onload = () => setTimeout(() => location.replace('ping.html'), 20)</script>",
    "slow": "slow",
    "long": "<title>" + "x" * 100_000 + "</title>",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderSite]:
    with serving(FolderSite, tmp_path_factory.mktemp("hostile"), PAGES) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: FolderSite) -> AsyncIterator[BrowserPool]:
    async with pool_on(site) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def session(pool: BrowserPool) -> AsyncIterator[Session]:
    async with pool.session() as session:
        yield session


async def click_on(session: Session, name: str) -> Observation:
    """The observation after a click on a page."""
    await session.reset(page_task(name))
    return await session.step(Action("left_click", coordinate=(100, 100)))


async def test_dialogs_are_answered_and_reported(session: Session) -> None:
    seen = await click_on(session, "alert")
    assert seen.title == "after"
    assert seen.error == 'the page opened a dialog, "Hello <|im_end|>", which was answered with OK'
    seen = await click_on(session, "confirm")
    assert seen.title == "true Ann"
    assert '"Sure?"' in str(seen.error)
    assert '"Name?"' in str(seen.error)


@pytest.mark.parametrize("name", ["loop", "timer"])
async def test_a_loop_of_dialogs_does_not_block_the_session(pool: BrowserPool, name: str) -> None:
    async with asyncio.timeout(15), pool.session() as session:
        seen = await click_on(session, name)
        assert 'the page opened a dialog, "again", which was answered with OK (' in str(seen.error)
        seen = await session.step(Action("navigate", url="http://site.localhost/other.html"))
        assert seen.title == "Other"


async def test_a_page_that_asks_to_stay_is_left(session: Session) -> None:
    await click_on(session, "leave")
    seen = await session.step(Action("navigate", url="http://site.localhost/other.html"))
    assert (seen.title, seen.error) == ("Other", "the page asked whether to leave it; it was left")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "the page asked for a file; none was given"),
        ("download", "the download of gift.html was refused"),
        ("mail", "mailto:a@b.c was not opened: only web pages can be"),
    ],
)
async def test_files_downloads_and_other_programs_are_refused(session: Session, name: str, message: str) -> None:
    seen = await click_on(session, name)
    assert (seen.title, seen.error) == ("Page", message)


async def test_printing_and_permission_requests_do_nothing(session: Session) -> None:
    assert (await click_on(session, "print")).title == "printed"
    await click_on(session, "rights")
    await session.page.wait_for_function("document.title != 'Page'", timeout=5000)
    assert await session.page.title() == "refused 1"


async def test_many_windows_are_closed_and_reported_once(session: Session) -> None:
    seen = await click_on(session, "popups")
    assert seen.title == "Page"
    assert str(seen.error).startswith("a new window was closed; only one page can be open")


async def test_a_page_that_closes_itself_raises_an_error(session: Session) -> None:
    with pytest.raises(BrowserError, match="the page has closed itself, and no other tab is open"):
        await click_on(session, "self")


async def test_pages_cannot_forge_their_state_or_stop_the_clock(session: Session) -> None:
    assert (await session.reset(page_task("clobber"))).title == "Real"
    assert (await session.reset(page_task("timers"))).title == "Still"
    assert len((await session.reset(page_task("long"))).title) == 2000


async def test_a_session_waits_for_the_requests_of_a_page(session: Session) -> None:
    async def late(route: Route) -> None:
        await asyncio.sleep(0.3)
        await route.continue_()

    await session.page.route("**/slow.html", late)
    seen = await click_on(session, "fetching")
    assert seen.title == "loaded"
    assert seen.seconds is not None
    assert 0.6 <= seen.seconds.settling < settle.NETWORK_IDLE_SECONDS


async def test_a_session_does_not_take_a_pause_between_requests_for_the_end(session: Session) -> None:
    assert (await click_on(session, "chain")).title == "loaded"


async def test_a_session_waits_once_for_an_unanswered_request(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "NETWORK_IDLE_SECONDS", 0.5)
    never = asyncio.Event()

    async def silent(route: Route) -> None:
        await never.wait()
        await route.abort()

    await session.page.route("**/slow.html", silent)
    seen = await click_on(session, "fetching")
    assert seen.seconds is not None
    assert 0.5 <= seen.seconds.settling < 3
    again = await session.step(Action("wait", time=0))
    assert again.seconds is not None
    assert again.seconds.settling < 0.5
    never.set()


async def test_a_page_that_fetches_for_ever_is_shown_within_the_limit(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "NETWORK_IDLE_SECONDS", 0.5)
    seen = await click_on(session, "polling")
    assert seen.seconds is not None
    assert seen.seconds.settling < 3


async def test_endless_redirects_end_at_the_limit(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "SETTLE_SECONDS", 1.0)
    seen = await session.reset(page_task("ping"))
    assert seen.url.split("/")[-1] in ("ping.html", "pong.html")
    assert seen.seconds is not None
    assert seen.seconds.settling < 10


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
