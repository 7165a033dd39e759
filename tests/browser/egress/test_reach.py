"""Pages in real Chromium try to reach a forbidden machine by every means; none connects to it.

127.0.0.1 stands in for a public address; 127.0.0.2, on the same port, must not be reached.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio
from playwright.async_api import Page

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.chromium import proxy_settings
from megatron_webrl.browser.egress import egress_policy
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.browser.session import Session
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.types import Action, Task
from tests.browser.conftest import FolderSite, page_task
from tests.browser.local_network import FORBIDDEN, NameService, WebServer
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 20.0


class Machine(WebServer):
    """A web server and a UDP port of one address. Counts datagrams."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.paths: list[str] = []
        self.datagrams = 0

    async def start(self, port: int = 0) -> None:
        await super().start(port)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.setblocking(False)
        self._udp.bind((self.address, self.port))
        asyncio.get_running_loop().add_reader(self._udp, self._datagram)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._udp)
        self._udp.close()
        super().close()

    def _datagram(self) -> None:
        self._udp.recv(65536)
        self.datagrams += 1

    async def respond(self, path: str, writer: asyncio.StreamWriter) -> None:
        self.paths.append(path)
        kind, _, target = path[1:].partition("?")
        code, extra = "200 OK", ""
        if kind == "redirect":
            code, extra = "302 Found", f"Location: {target}\r\n"
        kinds = {"worker.js": "text/javascript", "frame": "text/html"}
        text = {"worker.js": WORKER, "frame": f"<meta http-equiv=refresh content='0;url={target}'>"}.get(kind, "x")
        body = f"<!DOCTYPE html><title>{kind}</title>{text}" if kind != "worker.js" else text
        writer.write(
            f"HTTP/1.1 {code}\r\n{extra}Content-Type: {kinds.get(kind, 'text/html')}\r\nConnection: close\r\n"
            f"Access-Control-Allow-Origin: *\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )


WORKER = """
self.onmessage = async event => {
  const results = await Promise.allSettled(event.data.map(url => fetch(url, {mode: 'no-cors'})));
  (event.source || self).postMessage(results.length);
};
self.onconnect = event => {
  const port = event.ports[0];
  port.onmessage = async event => {
    const results = await Promise.allSettled(event.data.map(url => fetch(url, {mode: 'no-cors'})));
    port.postMessage(results.length);
  };
};
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[tuple[Machine, Machine]]:
    public, inner = Machine("127.0.0.1"), Machine(FORBIDDEN)
    await public.start()
    await inner.start(public.port)
    yield public, inner
    public.close()
    inner.close()


names = NameService()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: FolderSite, machines: tuple[Machine, Machine]) -> AsyncIterator[BrowserPool]:
    settings = BrowserConfig(width=400, height=300, screenshot="png", open_web=True, ports=[machines[0].port])
    pool = BrowserPool(settings, {"site": site}, 1, SECONDS)
    pool.egress_proxy = EgressProxy(settings, names.look_up)
    async with pool:
        yield pool


@pytest.fixture(autouse=True)
def default_names(first_loopback_is_public: None) -> None:
    names.answers = {"inner.test": [FORBIDDEN]}


@asynccontextmanager
async def opened(pool: BrowserPool, machines: tuple[Machine, Machine]) -> AsyncIterator[Session]:
    """A session on a page of the public server; afterwards the forbidden machine must not have been reached."""
    public, inner = machines
    async with pool.session() as session, asyncio.timeout(SECONDS):
        await session.reset(page_task("first"))
        await session.page.goto(f"http://public.test:{public.port}/start")
        assert await session.page.title() == "start"
        yield session
    assert (inner.connections, inner.datagrams, inner.paths) == (0, 0, [])


def forbidden(port: int) -> list[str]:
    """URLs of the forbidden machine, by each of its names."""
    return [f"http://{host}:{port}/secret" for host in ("127.0.0.2", "inner.test", "2130706434", "[::ffff:127.0.0.2]")]


@pytest.mark.parametrize("way", ["address", "name", "redirect", "script", "refresh"])
async def test_a_refused_navigation_shows_the_reason(
    pool: BrowserPool, machines: tuple[Machine, Machine], way: str
) -> None:
    port = machines[0].port
    target = f"http://{'inner.test' if way == 'name' else '127.0.0.2'}:{port}/secret"
    async with opened(pool, machines) as session:
        if way == "redirect":
            seen = await session.step(Action("navigate", url=f"http://public.test:{port}/redirect?{target}"))
        elif way in ("script", "refresh"):
            url = f"http://public.test:{port}/frame?{target}" if way == "refresh" else target
            async with session.page.expect_navigation(url="**/secret"):
                await session.page.evaluate("url => { location.href = url; }", url)
            seen = await session.step(Action("wait", time=0))
        else:
            seen = await session.step(Action("navigate", url=target))
        assert "127.0.0.2, which is a loopback address" in str(seen.error)
        assert session.network.refused["loopback"] == (0 if way == "address" else 1)


@pytest.mark.parametrize(
    "element",
    ["<img src=URL>", "<script src=URL></script>", "<link rel=stylesheet href=URL>", "<iframe src=URL></iframe>",
     "<object data=URL></object>", "<video src=URL></video>", "<link rel=preconnect href=URL>",
     "<link rel=dns-prefetch href=URL>", "<link rel=prefetch href=URL>", "<link rel=modulepreload href=URL>"],
)  # fmt: skip
async def test_an_element_of_a_page_reaches_nothing(
    pool: BrowserPool, machines: tuple[Machine, Machine], element: str
) -> None:
    async with opened(pool, machines) as session:
        urls = forbidden(machines[0].port)
        await session.page.evaluate(
            """html => { const range = document.createRange(); range.selectNode(document.body);
                         document.body.append(range.createContextualFragment(html)); }""",
            "".join(element.replace("URL", url) for url in urls),
        )
        if "connect" in element or "prefetch" in element or "modulepreload" in element:
            await fetched(session.page, [f"http://public.test:{machines[0].port}/after"])
        else:
            await eventually(lambda: session.network.refused["loopback"] >= 1, SECONDS)


async def fetched(page: Page, urls: list[str]) -> list[str]:
    return await page.evaluate(
        """urls => Promise.all(urls.map(url => fetch(url, {mode: 'no-cors', cache: 'no-store'}).then(
            answer => 'answered', error => 'failed')))""",
        urls,
    )


async def test_requests_of_scripts_reach_nothing(pool: BrowserPool, machines: tuple[Machine, Machine]) -> None:
    urls = forbidden(machines[0].port)
    async with opened(pool, machines) as session:
        await fetched(session.page, urls)
        await session.page.evaluate(
            """urls => Promise.all(urls.map(url => new Promise(done => {
                navigator.sendBeacon(url, 'x');
                const source = new EventSource(url);
                source.onerror = () => { source.close();
                    const request = new XMLHttpRequest();
                    request.onloadend = done; request.open('POST', url); request.send('x'); };
            })))""",
            urls,
        )
        assert session.network.refused["loopback"] >= 3 * len(urls)


async def test_sockets_reach_nothing(pool: BrowserPool, machines: tuple[Machine, Machine]) -> None:
    async with opened(pool, machines) as session:
        urls = [url.replace("http", "ws") for url in forbidden(machines[0].port)]
        closed = await session.page.evaluate(
            """urls => Promise.all(urls.map(url => new Promise(done => {
                new WebSocket(url).onclose = event => done(event.code); })))""",
            urls,
        )
        assert closed == [1006] * len(urls)
        assert session.network.refused["loopback"] >= len(urls)


async def test_peer_connections_and_web_transport_reach_nothing(
    site: FolderSite, pool: BrowserPool, machines: tuple[Machine, Machine]
) -> None:
    async with opened(pool, machines) as session:
        await session.page.goto("http://site.localhost/first.html")  # WebTransport needs a secure context
        outcome = await session.page.evaluate(
            """async place => {
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
            }""",
            f"127.0.0.2:{machines[1].port}",
        )
        assert outcome == "failed"


async def test_workers_reach_nothing(site: FolderSite, pool: BrowserPool, machines: tuple[Machine, Machine]) -> None:
    urls = forbidden(machines[0].port)
    async with opened(pool, machines) as session:
        await session.page.goto(f"http://public.test:{machines[0].port}/start")
        counts = await session.page.evaluate(
            """async urls => {
                const ask = port => new Promise(done => {
                    port.onmessage = event => done(event.data); port.postMessage(urls); });
                return [await ask(new Worker('/worker.js')), await ask(new SharedWorker('/worker.js').port)];
            }""",
            urls,
        )
        assert counts == [len(urls)] * 2
        assert session.network.refused["loopback"] >= 2 * len(urls)


async def test_a_service_worker_reaches_nothing(
    site: FolderSite, pool: BrowserPool, machines: tuple[Machine, Machine]
) -> None:
    """In a context of its own, because contexts of sessions block service workers."""
    (site.folder / "service.js").write_text(WORKER)
    site_with_worker = FolderSite(site.folder)  # a server reads its files when it starts
    declared = egress_policy.declared_endpoints(site_with_worker.origins, site_with_worker.addresses)
    network = await pool.egress_proxy.open_port(declared)
    urls = forbidden(machines[0].port)
    async with pool.session() as session, asyncio.timeout(SECONDS):
        browser = session.page.context.browser
        assert browser is not None
        context = await browser.new_context(proxy=proxy_settings(network.port))
        page = await context.new_page()
        await page.goto("http://site.localhost/first.html")
        count = await page.evaluate(
            """async urls => {
                await navigator.serviceWorker.register('/service.js');
                const worker = (await navigator.serviceWorker.ready).active;
                return new Promise(done => { navigator.serviceWorker.onmessage = event => done(event.data);
                                             worker.postMessage(urls); });
            }""",
            urls,
        )
        await context.close()
    assert count == len(urls)
    assert network.refused["loopback"] >= len(urls)
    assert (machines[1].connections, machines[1].paths) == (0, [])
    await network.close()
    site_with_worker.server.close()


async def test_pop_ups_reach_nothing(pool: BrowserPool, machines: tuple[Machine, Machine]) -> None:
    urls = forbidden(machines[0].port)
    async with opened(pool, machines) as session:
        await session.page.evaluate(
            """urls => { for (const url of urls) { window.open(url);
                const form = document.createElement('form'); form.action = url; form.target = '_blank';
                document.body.append(form); form.submit(); } }""",
            urls,
        )
        seen = await session.step(Action("wait", time=0))
        assert "a new window was closed" in str(seen.error)


async def test_a_name_that_changes_to_an_inner_address_while_its_page_is_open_reaches_nothing(
    pool: BrowserPool, machines: tuple[Machine, Machine]
) -> None:
    origin = f"http://rebind.test:{machines[0].port}"
    async with opened(pool, machines) as session:
        await session.page.goto(f"{origin}/start")
        text = "path => fetch(path, {cache: 'no-store'}).then(answer => answer.text())"
        assert "<title>public</title>" in await session.page.evaluate(text, "/public")
        names.answers["rebind.test"] = ["127.0.0.2"]
        refused = await session.page.evaluate(text, "/secret")
        assert "rebind.test leads to 127.0.0.2, which is a loopback address" in refused
        names.answers["rebind.test"] = ["127.0.0.1", "127.0.0.2"]
        assert "which is a loopback address" in await session.page.evaluate(text, "/secret")
        names.answers["rebind.test"] = ["127.0.0.1"]
        assert "<title>public</title>" in await session.page.evaluate(text, "/public")


async def test_the_pages_of_a_task_source_are_reached_in_its_own_episodes_only(site: FolderSite) -> None:
    other = OtherSite(site.folder)
    try:
        async with BrowserPool(
            BrowserConfig(width=400, height=300), {"site": site, "other": other}, 1, SECONDS
        ) as pool:
            for own, foreign in (("site", "other"), ("other", "site")):
                async with pool.session() as session:
                    await session.reset(replace(page_task("first"), source=own))
                    assert await session.page.title() == "First"
                    seen = await session.step(Action("navigate", url=f"http://{foreign}.localhost/second.html"))
                    assert f"{foreign}.localhost:80 is not one of the allowed places" in str(seen.error)
                    await fetched(session.page, [f"http://{foreign}.localhost/second.html"])
                    assert session.network.refused == {"not_declared": 1}  # the navigation was refused without one
    finally:
        other.server.close()


class OtherSite(FolderSite):
    """The same pages as another task source."""

    @property
    def origins(self) -> frozenset[str]:
        return frozenset({"http://other.localhost"})

    @property
    def addresses(self) -> dict[str, str]:
        return {"other.localhost": self.server.address}

    async def open(self, page: Page, task: Task) -> str:
        await page.goto(f"http://other.localhost/{task.environment}.html")
        return ""


async def test_endless_redirects_end_at_the_request_limit_of_the_episode(
    site: FolderSite, machines: tuple[Machine, Machine]
) -> None:
    settings = BrowserConfig(width=400, height=300, open_web=True, ports=[machines[0].port], max_requests=5)
    pool = BrowserPool(settings, {"site": site}, 1, SECONDS)
    pool.egress_proxy = EgressProxy(settings, names.look_up)
    async with pool, pool.session() as session:
        await session.reset(page_task("first"))
        url = f"http://public.test:{machines[0].port}/end"
        for _ in range(9):
            url = f"http://public.test:{machines[0].port}/redirect?{url}"
        seen = await session.step(Action("navigate", url=url))
        assert "the episode has used its 5 requests (browser.max_requests)" in str(seen.error)
        assert session.network.requests == 5
