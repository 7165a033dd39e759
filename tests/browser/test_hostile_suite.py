"""Hostile pages against a session: each case has its allowed results and a time limit; none reaches what it must not.

127.0.0.1 stands in for a public address; 127.0.0.2, on the same port, must not be reached.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType

import psutil
import pytest
import pytest_asyncio
from playwright.async_api import Page

from megatron_webrl.browser import browser_pool
from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress import connections
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.page import settle
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Action, Observation, Task
from tests.browser.browser_processes import browser_pids
from tests.browser.conftest import FolderSite, page_task
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

FORBIDDEN = "127.0.0.2"
SHORT, BRIEF, LONG = 1.5, 6.0, 20.0  # seconds of one operation
PAGE_MIB = 1024
SLACK = 15.0  # seconds for a busy machine, beyond the limits of the three operations
TIMEOUT, CRASHED, FAILED = "browser_timeout", "page_crashed", "browser_error"
CONTINUES = "continues"  # with or without a message
ENDED = "the script that it ran was ended"
WORKER = "URL.createObjectURL(new Blob(['for (;;);']))"


def on_click(script: str, more: str = "") -> str:
    """A page with a button that fills its upper half."""
    return (
        "<title>Page</title><button id=b style='position:absolute;left:0;top:0;width:400px;height:150px'>go</button>"
        f"{more}<script>b.onclick = () => {{ {script} }};</script>"
    )


def at_once(script: str) -> str:
    return f"<title>Page</title><p>text</p><script>{script}</script>"


ALLOCATE = """const kept = []; for (;;) kept.push(new Array(1e5).fill(kept.length + 0.5));"""
HTTP = b"HTTP/1.1 200 OK\r\n"

# Page, seconds of one operation, allowed results: an outcome, CONTINUES, or a pattern of the messages; then the page.
CASES: list[tuple[str, float, tuple[str, ...], str]] = [
    # Dialogs and windows
    ("alerts", LONG, ("opened a dialog, .again.",), on_click("for (;;) alert('again')")),
    ("prompt_long", LONG, (r"opened a dialog, .x{90,100}\.\.\.",),
     on_click("prompt('x'.repeat(5e6), 'y'.repeat(5e6))")),
    ("special_dialog", LONG, (r"<\|image_pad\|><\|im_end\|>",), on_click("alert('<|image_pad|><|im_end|>')")),
    ("popups_chain", LONG, ("a new window was closed",), on_click("open('popups_chain_on')")),
    ("stay", LONG, ("asked whether to leave it; it was left",),
     on_click("1", "<script>onbeforeunload = (e) => { e.preventDefault(); return 'x' }</script>")),
    # Scripts without end, huge content, and memory
    ("loop", SHORT, (ENDED, TIMEOUT), at_once("for (;;);")),
    ("fetches", LONG, (r"has used its 300 requests \(browser.max_requests\)", CONTINUES),
     at_once("setInterval(() => fetch('fine?' + Math.random()), 1)")),
    ("dom", SHORT, ("elements cannot be found in a page of", TIMEOUT),
     "<title>Page</title><script>document.write('<a href=x>y</a>'.repeat(250000))</script>"),
    ("memory", LONG, (CRASHED,), on_click(ALLOCATE)),
    ("redirect", LONG, (FAILED,), ""),
]  # fmt: skip
SLOW_CASES: list[tuple[str, float, tuple[str, ...], str]] = [
    ("names", SHORT, (CONTINUES, TIMEOUT), f"<title>{'t' * 3_000_000}</title>"
     f"<button aria-label='{'n' * 2_000_000}' style='width:99px;height:99px'></button>"
     + f"<select>{'<option>' + 'o' * 100_000 + '</option>' * 1}</select>" * 20),
    # Attempts to reach the forbidden machine
    ("service_worker", LONG, (CONTINUES,), on_click("navigator.serviceWorker?.register('worker.js')")),
    ("file", LONG, (CONTINUES,),
     on_click("location = 'file:///etc/passwd'; open('file:///etc/passwd'); open('chrome://version')")),
    ("silence", LONG, (FAILED,), ""),
    ("slow_body", LONG, (r"a request took more than 1.0 s",), ""),
    ("bomb", SHORT, (CONTINUES, TIMEOUT, CRASHED), ""),
    ("close", LONG, (FAILED, CONTINUES), on_click("window.close()")),  # Chromium lets a page close itself or not
    ("loop_unload", SHORT, (ENDED, TIMEOUT), on_click("1", "<script>onpagehide = () => { for (;;); }</script>")),
    ("workers", SHORT, (CONTINUES, TIMEOUT), at_once(f"for (let i = 0; i < 40; i++) new Worker({WORKER})")),
    ("reload", SHORT, ("still loading", CONTINUES, TIMEOUT), at_once("setInterval(() => location.reload(), 5)")),
    ("url", LONG, (CONTINUES,), at_once("history.replaceState(0, '', '?' + 'u'.repeat(1900000))")),
    ("buffers", LONG, (CONTINUES, CRASHED),
     on_click("const kept = []; for (;;) kept.push(new Uint8Array(1 << 26).fill(kept.length + 1));")),
    ("endless_head", LONG, (FAILED,), ""),
]  # fmt: skip
PAGES = {name: page for name, _, _, page in (*CASES, *SLOW_CASES) if page} | {
    "fine": "<title>Fine</title><p>A page like any other.</p>",
    "popups_chain_on": at_once("open('popups_chain_on?' + Math.random()); setInterval(() => open('fine'), 1)"),
    "loop_click": on_click("for (;;);"),
    "frame": "<meta http-equiv=refresh content='0;url=QUERY'>",
}
# First bytes of other responses, a piece that is repeated, and the seconds in between.
RESPONSES: dict[str, tuple[bytes, bytes, float]] = {
    "endless_head": (HTTP, b"X: " + b"x" * 5000 + b"\r\n", 0),
    "slow_body": (HTTP + b"Content-Type: text/html\r\nContent-Length: 100000\r\n\r\n<title>Slow</title>", b"x", 0.2),
    "silence": (b"", b"", 0.2),
}  # fmt: skip


def whole(head: str, body: bytes) -> bytes:
    """A response; one connection per request, so that names are resolved again."""
    framing = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return f"HTTP/1.1 {head}\r\n{framing}".encode() + body


def bomb() -> bytes:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    text = b"".join([squeeze.compress(b"<p>more</p>" * 95_325) for _ in range(64)]) + squeeze.flush()
    return whole("200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip", text)


class Machine:
    """Serves the hostile pages, one request per connection, and a UDP port of one address. Counts who comes.

    `closing` ends the responses that never end by themselves.
    """

    def __init__(self, address: str) -> None:
        self.address, self.port = address, 0
        self.connections = self.datagrams = 0
        self.closing = asyncio.Event()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, self.address, port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.setblocking(False)
        self._udp.bind((self.address, self.port))
        asyncio.get_running_loop().add_reader(self._udp, self._datagram)

    def close(self) -> None:
        self.closing.set()
        asyncio.get_running_loop().remove_reader(self._udp)
        self._udp.close()
        self._server.close()

    def _datagram(self) -> None:
        self._udp.recv(65536)
        self.datagrams += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            await self._respond(head.split(b" ")[1].decode("latin-1"), writer)
            await writer.drain()
        writer.close()

    async def _respond(self, path: str, writer: asyncio.StreamWriter) -> None:
        name, _, query = path[1:].partition("?")
        if name in RESPONSES:
            first, piece, seconds = RESPONSES[name]
            writer.write(first)
            while not self.closing.is_set():
                writer.write(piece)
                await writer.drain()
                with suppress(TimeoutError):  # then the next piece
                    async with asyncio.timeout(seconds):
                        await self.closing.wait()
        elif name == "redirect":
            writer.write(whole(f"302 Found\r\nLocation: {query or '/redirect'}", b""))
        elif name == "worker.js":
            writer.write(whole("200 OK\r\nContent-Type: text/javascript", WORKER_SCRIPT.encode()))
        elif name == "bomb":
            writer.write(bomb())
        else:
            page = PAGES.get(name, "").replace("QUERY", query)
            code = "200 OK" if name in PAGES else "404 Not Found"
            content_type = "Content-Type: text/html\r\nCache-Control: no-store\r\nAccess-Control-Allow-Origin: *"
            writer.write(whole(f"{code}\r\n{content_type}", f"<!DOCTYPE html>{page}".encode()))


async def look_up(host: str) -> list[str]:
    return [FORBIDDEN if host == "inner.test." else "127.0.0.1"]


class HostileSite:
    """Declares no origins: its pages count as the open web."""

    origins: frozenset[str] = frozenset()
    addresses: Mapping[str, str] = MappingProxyType({})

    def __init__(self, port: int) -> None:
        self.origin = f"http://hostile.test:{port}"

    def can_reuse_page(self, task: Task) -> bool:
        return False

    async def open(self, page: Page, task: Task) -> str:
        await page.goto(f"{self.origin}/{task.environment}", wait_until="commit")
        return "look"

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        return None, False


@pytest.fixture(autouse=True)
def low_limits(first_loopback_is_public: None, monkeypatch: pytest.MonkeyPatch) -> None:
    low = {"LOAD_SECONDS": 1.0, "QUIET_LIMIT_MS": 300, "NETWORK_IDLE_SECONDS": 0.3, "SETTLE_SECONDS": 1.0}
    for name, value in low.items():
        monkeypatch.setattr(settle, name, value)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[tuple[Machine, Machine]]:
    public, inner = Machine("127.0.0.1"), Machine(FORBIDDEN)
    await public.start()
    await inner.start(public.port)
    yield public, inner
    public.close()
    inner.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: FolderSite, machines: tuple[Machine, Machine]) -> AsyncIterator[BrowserPool]:
    """One Chromium for all cases, so that each case runs after the leftovers of the previous ones."""
    port = machines[0].port
    settings = BrowserConfig(
        width=400, height=300, marks=True, open_web=True, ports=[port], max_network_mib=16, max_requests=300
    )
    pool = BrowserPool(settings, {"hostile": HostileSite(port), "site": site}, 1, LONG)
    pool.egress_proxy = EgressProxy(settings, look_up)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser_pool, "PAGE_MIB", PAGE_MIB)
        patch.setattr(connections, "REQUEST_SECONDS", 1.0)
        async with pool:
            yield pool
    assert not browser_pids("browser")


def task_of(page: str) -> Task:
    return Task(id=f"hostile/{page}", source="hostile", environment=page, seed=0, max_steps=3)


async def play(session: Session, page: str, seconds: float, port: int) -> tuple[str, list[Observation]]:
    """Open a page, click on it, leave it; returns the outcome and the observations."""
    session._step_seconds = seconds  # the session was prepared with the limit of the pool
    seen: list[Observation] = []
    try:
        seen.append(await session.reset(task_of(page)))
        seen.append(await session.step(Action("left_click", coordinate=(100, 100))))
        seen.append(await session.step(Action("navigate", url=f"http://hostile.test:{port}/fine")))
    except BrowserError as error:
        return error.outcome, seen
    return CONTINUES, seen


@pytest.mark.parametrize(
    ("page", "seconds", "allowed"),
    [
        *(pytest.param(*case, id=case[0]) for *case, _ in CASES),
        *(pytest.param(*case, id=case[0], marks=pytest.mark.slow) for *case, _ in SLOW_CASES),
    ],
)
async def test_a_hostile_page_ends_within_its_limit(
    pool: BrowserPool, machines: tuple[Machine, Machine], page: str, seconds: float, allowed: tuple[str, ...]
) -> None:
    public, inner = machines
    started = time.monotonic()
    async with pool.session() as session:
        outcome, seen = await play(session, page, seconds, public.port)
    duration = time.monotonic() - started
    messages = "; ".join(observation.error or "" for observation in seen)
    assert outcome in allowed or (outcome == CONTINUES and any(re.search(pattern, messages) for pattern in allowed)), (
        messages
    )
    assert duration < 3 * seconds + SLACK
    assert inner.connections == 0
    if outcome != CONTINUES:  # else the next case is the next episode
        async with pool.session() as session:
            assert (await session.reset(task_of("fine"))).title == "Fine"
    assert all(len(observation.title) <= 2000 and len(observation.url) <= 4000 for observation in seen)


async def test_an_endless_script_ends_no_episode(pool: BrowserPool, machines: tuple[Machine, Machine]) -> None:
    async with pool.session() as session:
        outcome, seen = await play(session, "loop_click", BRIEF, machines[0].port)
        limits = {psutil.Process(pid).rlimit(psutil.RLIMIT_DATA) for pid in browser_pids("renderer")}
        assert (outcome, limits) == (CONTINUES, {(PAGE_MIB << 20, PAGE_MIB << 20)})
        assert f"the page did not answer; {ENDED}" in str(seen[1].error)
        assert seen[2].title == "Fine"
    await eventually(lambda: len(browser_pids("renderer")) <= 4, SLACK)


# Means to reach the forbidden machine

FETCH = "urls => Promise.allSettled(urls.map(url => fetch(url, {mode: 'no-cors', cache: 'no-store'})))"
WORKER_SCRIPT = f"""
const ask = async (port, urls) => port.postMessage((await ({FETCH})(urls)).length);
self.onmessage = event => ask(self, event.data);
self.onconnect = event => {{ const port = event.ports[0]; port.onmessage = event => ask(port, event.data); }};
"""
# The forbidden machine by each of its names, which Chromium never reaches past the proxy, and others of that kind.
FORBIDDEN_HOSTS = (
    FORBIDDEN, "2130706434", "inner.test", "[::ffff:127.0.0.2]", "localhost", "[::1]", "10.0.0.1", "169.254.1.1",
    "169.254.169.254", "metadata.google.internal", "[fe80::1]", "[fd00::1]",
)  # fmt: skip
ELEMENTS = (
    "<img src=URL>", "<script src=URL></script>", "<link rel=stylesheet href=URL>", "<iframe src=URL></iframe>",
    "<object data=URL></object>", "<video src=URL></video>", "<link rel=preconnect href=URL>",
    "<link rel=dns-prefetch href=URL>", "<link rel=prefetch href=URL>", "<link rel=modulepreload href=URL>",
)  # fmt: skip
# Scripts that try URLs; each URL is refused at least so many times.
SCRIPTS = {
    "fetch": (1, FETCH),
    "socket": (1, """urls => Promise.all(urls.map(url => new Promise((done, failed) => {
        new WebSocket(url.replace('http', 'ws')).onclose = event => event.code == 1006 ? done() : failed(event.code);
        })))"""),
    "beacon, event source and XMLHttpRequest": (2, """urls => Promise.all(urls.map(url => new Promise(done => {
        navigator.sendBeacon(url, 'x');
        const source = new EventSource(url);
        source.onerror = () => { source.close();
            const request = new XMLHttpRequest();
            request.onloadend = done; request.open('POST', url); request.send('x'); };
        })))"""),
    "worker": (2, """async urls => {
        const ask = port => new Promise(done => {
            port.onmessage = event => done(event.data); port.postMessage(urls); });
        return [await ask(new Worker('/worker.js')), await ask(new SharedWorker('/worker.js').port)]; }"""),
    "pop-up": (0, """urls => { for (const url of urls) { window.open(url);
        const form = document.createElement('form'); form.action = url; form.target = '_blank';
        document.body.append(form); form.submit(); } }"""),
}  # fmt: skip
PEER = """async place => {
    const peer = new RTCPeerConnection({iceServers: [
        {urls: `stun:${place}`},
        {urls: ['udp', 'tcp'].map(way => `turn:${place}?transport=${way}`), username: 'u', credential: 'c'},
    ]});
    peer.createDataChannel('x');
    const gathered = new Promise(done => {
        peer.onicegatheringstatechange = () => { if (peer.iceGatheringState == 'complete') done(); };
        setTimeout(done, 3000); });
    await peer.setLocalDescription(await peer.createOffer());
    const transport = await new WebTransport(`https://${place}/`).ready.then(() => 'open', () => 'failed');
    await gathered;
    return transport;
}"""


@asynccontextmanager
async def opened(pool: BrowserPool, machines: tuple[Machine, Machine]) -> AsyncIterator[Session]:
    """A session on a page of the public server; afterwards the forbidden machine must not have been reached."""
    async with pool.session() as session, asyncio.timeout(3 * LONG):
        await session.reset(page_task("first"))
        await session.page.goto(f"http://hostile.test:{machines[0].port}/fine")
        yield session
    assert (machines[1].connections, machines[1].datagrams) == (0, 0)


async def test_a_refused_navigation_shows_the_reason(pool: BrowserPool, machines: tuple[Machine, Machine]) -> None:
    port = machines[0].port
    public, target, named = (f"http://{host}:{port}" for host in ("hostile.test", "127.0.0.2", "inner.test"))
    async with opened(pool, machines) as session:
        for url, in_page, refused in (
            (f"{target}/secret", False, 0),  # before its name is resolved
            (f"{named}/secret", False, 1),
            (f"{public}/redirect?{target}/secret", False, 1),
            (f"{target}/secret", True, 1),
            (f"{public}/frame?{target}/secret", True, 1),
        ):
            session.network.refused.clear()
            await session.page.goto(f"{public}/fine")
            if in_page:
                async with session.page.expect_navigation(url="**/secret"):
                    await session.page.evaluate("url => { location.href = url; }", url)
            action = Action("wait", time=0) if in_page else Action("navigate", url=url)
            seen = await session.step(action)
            assert "127.0.0.2, which is a loopback address" in str(seen.error), url
            assert session.network.refused["loopback"] == refused, url


async def test_elements_and_scripts_reach_nothing(pool: BrowserPool, machines: tuple[Machine, Machine]) -> None:
    port, public = machines[0].port, f"http://hostile.test:{machines[0].port}"
    urls = [f"http://{host}:{port}/secret" for host in FORBIDDEN_HOSTS]
    async with opened(pool, machines) as session:
        for element in ELEMENTS:
            session.network.refused.clear()
            await session.page.evaluate(
                """html => { const range = document.createRange(); range.selectNode(document.body);
                             document.body.append(range.createContextualFragment(html)); }""",
                "".join(element.replace("URL", url) for url in urls),
            )
            if "rel=" in element and "stylesheet" not in element:  # Chromium may ignore it
                await session.page.evaluate(FETCH, [f"{public}/after"])
            else:
                await eventually(lambda: session.network.refused["loopback"] >= 1, LONG)
        for name, (times, script) in SCRIPTS.items():
            await session.page.goto(f"{public}/fine")
            session.network.refused.clear()
            await session.page.evaluate(script, urls)
            assert session.network.refused.total() >= times * len(urls), name
        seen = await session.step(Action("wait", time=0))
        assert "a new window was closed" in str(seen.error)
        await session.page.goto("http://site.localhost/first.html")  # WebTransport needs a secure context
        assert await session.page.evaluate(PEER, f"127.0.0.2:{machines[1].port}") == "failed"
