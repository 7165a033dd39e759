"""Episodes recorded in Chromium and replayed: on a site whose every response differs, and on our own sites.

The changing site behaves like a public one: stories, numbers and pictures come from a counter. Its pages redirect, set
cookies, load styles, scripts, a font and pictures from a second host, compressed, cached and revalidated, show the time
and random numbers, put both into the URLs they request, post forms, JSON and blobs, give a request up, and are never at
rest.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import matplotlib
import pytest
import pytest_asyncio
from PIL import Image

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress.har import HAR_MEMBER, READ_REQUEST_HEADERS, visit_path
from megatron_webrl.browser.errors import BrowserError, NotRecorded
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.sites.site_task_source import SiteTaskSource
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Observation, Task
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAPER, MEDIA = "http://www.paper.test", "http://media.paper.test"
START = f"{PAPER}/"
WIDTH, HEIGHT = 640, 480  # of the viewport for which the pages are laid out, pixels
# Middles of the controls, in the coordinates of actions.
QUOTE, SEARCH, STORY, WIDGET = (94, 125), (344, 125), (94, 208), (594, 125)
UTF8_HEADER = "\u65e5\u672c".encode().decode("latin-1")  # as http.server takes it
PATIENCE_SECONDS = 10.0  # with a page that is about to give a request up

HOME = """<!DOCTYPE html><html><head><title>Paper {number}</title>
<link rel="stylesheet" href="{media}/latest/style.css"><script src="/app.js" defer></script></head>
<body><h1>Edition {number}</h1>
<button id="quote" style="left:20px;top:45px">quote</button>
<form method="post" action="/search"><input id="words" name="words" style="left:140px;top:45px;width:160px"></form>
<a id="story" style="left:20px;top:85px" href="/story/{number}">story</a>
<iframe src="{media}/widget" style="left:320px;top:30px;width:120px;height:60px;border:0"></iframe>
<p class="low"><img src="{media}/photo/{number}.png" width="200" height="120"> <img src="{media}/mark.png" width="40">
<img src="{media}/turning.gif" width="40"><span class="spinner"></span> <b id="late"></b></p>
<p id="time"></p><p id="luck"></p><p id="said"></p><p id="json"></p><p id="cookies"></p><p id="more"></p></html>"""

SECTION = """<!DOCTYPE html><title>Section</title><h1>Section {number}</h1>
<a href="/story/{number}" style="position:absolute;left:20px;top:85px">story</a>"""
ARTICLE = """<!DOCTYPE html><title>Story</title><h1>Story {number}</h1><a href=/>back</a>
<p><script>document.write(document.lastModified)</script></p>"""

STYLE = """@font-face { font-family: press; src: url(fonts/press.ttf); }
body { font-family: press; margin: 10px; background: url(tile.png); } h1 { font-size: 18px; margin: 0; }
button, input, a, iframe { position: absolute; height: 22px; } p { margin: 4px; } .low { margin-top: 80px; }
b { opacity: 0; animation: come 0.6s 0.2s forwards; } @keyframes come { to { opacity: 1; } }
.spinner { display: inline-block; width: 30px; height: 30px; border: 4px solid red; border-top-color: blue;
           animation: turn 1.1s linear infinite; } @keyframes turn { to { transform: rotate(360deg); } }"""

SCRIPT = """const show = (id, text) => { document.getElementById(id).textContent = text; };
const format = new Intl.DateTimeFormat("en", {timeStyle: "medium"});
show("time", [new Date().toISOString(), Date.now(), new Date("2020-01-01").getFullYear(), document.lastModified,
  format.format(), format.formatToParts()[0].value, globalThis.Temporal && Temporal.Now.plainTimeISO()].join(" "));
show("luck", [Math.random(), Math.random(), crypto.getRandomValues(new Uint32Array(1))[0]].join(" "));
show("late", "late");
document.cookie = "seen=1; expires=" + new Date(Date.now() + 60000).toUTCString();
setTimeout(() => show("cookies", document.cookie.split("; ").sort().join("; ") + " " + Date.now()), 30);
fetch("/api/mood", {method: "POST", headers: {"Content-Type": "application/json"},
                    body: JSON.stringify({luck: Math.floor(Math.random() * 1e9), at: Date.now()})})
  .then((answer) => answer.json()).then((mood) => show("json", mood.mood));
const text = async (url, options) => (await fetch(url, options)).text();
const impatient = async () => {
  const patience = new AbortController(), heard = new AbortController();
  setTimeout(() => patience.abort(), 30);
  setTimeout(() => heard.abort(), 30);
  const tried = [text("/api/never", {signal: patience.signal}), text("/api/half", {signal: heard.signal})];
  return (await Promise.all(tried.map((each) => each.catch((error) => error.name)))).join(" ");
};
const more = async () => {
  const editions = [];
  for (const cache of ["default", "default", "reload", "default"]) editions.push(await text("/api/edition", {cache}));
  const posted = await text("/api/upload", {method: "POST", body: new Blob(["picture"])});
  const named = (await fetch("/api/named")).headers.get("x-name");
  show("more", ["editions", ...editions, posted, named, await impatient()].join(" "));
};
more();
const callback = "got" + Math.floor(Math.random() * 1e9);
window[callback] = (text) => show("said", text);
const quote = () => { const tag = document.createElement("script");
  tag.src = "/api/quote?callback=" + callback + "&_=" + Date.now(); document.head.append(tag); };
document.getElementById("quote").onclick = quote;"""


ACTIONS = [  # what agents do on the site, in parts
    [Action("left_click", coordinate=QUOTE), Action("left_click", coordinate=QUOTE)],
    [Action("left_click", coordinate=SEARCH), Action("type", text="words")],
    [Action("navigate", url=START), Action("left_click", coordinate=STORY), Action("go_back")],
    [Action("scroll", direction="down"), Action("navigate", url=f"{PAPER}/moved")],
    [Action("left_click", coordinate=WIDGET)],
]


def web_actions(*parts: int) -> list[Action]:
    return [action for part in parts for action in ACTIONS[part]]


TASK = Task(id="web/paper", source="web", environment="page", seed=0, max_steps=8, instruction="read", url=START)


class Server(ThreadingHTTPServer):
    request_queue_size = 128


class ChangingWeb(OpenWeb):
    """The open web, of which only the changing site exists. `close` stops its server."""

    def __init__(self) -> None:
        super().__init__(TASK.max_steps)
        self._server = Server(("127.0.0.1", 0), Handler)
        self._address = f"127.0.0.1:{self._server.server_address[1]}"
        Handler.count, Handler.log = itertools.count(1), []
        Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def origins(self) -> frozenset[str]:
        return frozenset({PAPER, MEDIA})

    @property
    def addresses(self) -> dict[str, str]:
        return {urlsplit(origin).netloc: self._address for origin in self.origins}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    count: Iterator[int]
    log: list[str]  # "METHOD path", of all requests

    def do_GET(self) -> None:
        number, path = next(self.count), urlsplit(self.path).path
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.log.append(f"{self.command} {self.path}")
        if path in ("/api/never", "/api/half"):
            self._send_never(path == "/api/half")
        elif path.startswith("/home/"):
            self._send(200, {}, HOME.format(number=number, media=MEDIA))
        elif path.startswith("/story/"):
            self._send(200, {"Last-Modified": at(-3600)}, ARTICLE.format(number=number))
        elif path == "/mark.png" and self.headers["If-None-Match"]:
            self._send(304, {"ETag": '"mark"'})
        elif path.endswith(".png"):
            marked = {"ETag": '"mark"', "Cache-Control": "no-cache"} if path == "/mark.png" else {}
            self._send(200, {"Content-Type": "image/png", **marked}, picture(7 if marked else number))
        else:
            visitor = f"visitor={number}; Expires={at(3600)}"
            kept = {"Cache-Control": "max-age=600"}
            widget = f"""<button onclick='this.textContent=Math.random()'>w{number}</button><script>
                document.body.append(new Date().getSeconds(), ' ', Math.random())</script>"""
            found: dict[str, tuple[int, dict[str, str], str | bytes]] = {
                "/": (302, {"Location": f"/home/{number}#top", "Set-Cookie": visitor}, ""),
                "/moved": (301, {"Location": f"{PAPER}/story/{number}"}, ""),
                "/section": (200, {}, SECTION.format(number=number)),
                "/app.js": (200, {"Content-Type": "text/javascript", "Content-Encoding": "gzip"}, SCRIPT),
                "/api/quote": (200, {"Content-Type": "text/javascript"}, f"{query.get('callback')}('quote {number}')"),
                "/api/edition": (200, {"Content-Type": "text/plain", **kept}, str(number)),
                "/api/named": (200, {"Content-Type": "text/plain", "X-Name": UTF8_HEADER}, ""),
                "/results": (200, {}, f"<!DOCTYPE html><title>Results</title><p>{number} of {query.get('words')}"),
                "/latest/style.css": (302, {"Location": "/v3/style.css"}, ""),
                "/v3/style.css": (200, {"Content-Type": "text/css", "Content-Encoding": "gzip", **kept}, STYLE),
                "/v3/fonts/press.ttf": (200, {"Access-Control-Allow-Origin": "*", "Content-Type": "font/ttf"}, font()),
                "/widget": (200, {}, widget),
                "/turning.gif": (200, {"Content-Type": "image/gif"}, animation()),
            }
            self._send(*found.get(path, (404, {}, "nothing here")))

    def do_POST(self) -> None:
        number, text = next(self.count), self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.log.append(f"{self.command} {self.path}")
        if self.path == "/search":
            self._send(303, {"Location": f"/results?{text}&n={number}"})
        elif self.path == "/api/upload":
            self._send(200, {"Content-Type": "text/plain"}, f"{text} {number}")
        else:
            self._send(200, {"Content-Type": "application/json"}, json.dumps({"mood": f"{number} {text}"}))

    def _send_never(self, begun: bool) -> None:
        """Send no response, or only its beginning, and wait for the page to give the request up."""
        if begun:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1000\r\n\r\n")
        self.connection.settimeout(PATIENCE_SECONDS)
        self.close_connection = True
        with suppress(OSError):
            self.rfile.read(1)

    def _send(self, status: int, headers: Mapping[str, str], body: str | bytes = b"") -> None:
        content = body.encode() if isinstance(body, str) else body
        content = gzip.compress(content) if "Content-Encoding" in headers else content
        length = {} if status == 304 else {"Content-Length": str(len(content))}
        try:
            self.send_response(status)
            for field in {"Content-Type": "text/html; charset=utf-8", **headers, **length}.items():
                self.send_header(*field)
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            self.close_connection = True  # the page was closed while it loaded

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def at(seconds: float) -> str:
    """The time in so many seconds, as a header has it."""
    return formatdate(time() + seconds, usegmt=True)


def font() -> bytes:
    return (Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSerif.ttf").read_bytes()


def picture(number: int) -> bytes:
    image, file = Image.linear_gradient("L").resize((64, 48)).rotate(number * 37 % 360), io.BytesIO()
    Image.merge("RGB", (image, image.rotate(number * 11 % 360), image.rotate(180))).save(file, "PNG")
    return file.getvalue()


def animation() -> bytes:
    file, frames = io.BytesIO(), [Image.new("P", (32, 32), colour) for colour in (1, 2, 3)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=90, loop=0)
    return file.getvalue()


HOME_PAGE, MOVED = Action("navigate", url=START), Action("navigate", url=f"{PAPER}/moved")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites() -> AsyncIterator[dict[str, Any]]:
    with SiteTaskSource(["forms-vote"], TasksConfig(max_steps=9)) as own:
        web = ChangingWeb()
        yield {"web": web, "sites": own}
        web.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


def settings(**chosen: Any) -> BrowserConfig:
    return BrowserConfig(width=WIDTH, height=HEIGHT, screenshot="png", **chosen)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorder(sites: dict[str, Any], folder: Path) -> AsyncIterator[BrowserPool]:
    async with BrowserPool(settings(record=str(folder)), sites, 1, 30.0) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replayer(sites: dict[str, Any], folder: Path) -> AsyncIterator[BrowserPool]:
    """A pool that may reach the open web, and has no request for it."""
    answering = settings(replay=str(folder), open_web=True)
    async with BrowserPool(answering, {**sites, "web": OpenWeb(9)}, 1, 30.0) as pool:
        yield pool
    assert pool.egress_proxy.totals.connections == 0


def task_of(name: str) -> Task:
    return replace(TASK, id=f"web/{name}")


async def play(pool: BrowserPool, task: Task, actions: Sequence[Action]) -> tuple[list[Observation], str]:
    async with pool.episode(task) as (session, first):
        seen = [first, *[await session.step(action) for action in actions]]
        return seen, await session.page.inner_text("body")


async def record(pool: BrowserPool, task: Task, actions: Sequence[Action]) -> tuple[list[Observation], str]:
    """The same, once its recording is complete."""
    recordings = pool.counters.recordings
    found = await play(pool, task, actions)
    await eventually(lambda: pool.counters.recordings == recordings + 1)
    return found


def rename_hosts(path: Path, names: Mapping[str, str]) -> None:
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            for old, new in names.items():
                content = content.replace(old.encode(), new.encode())
            file.writestr(name, content)


async def test_a_changing_site_is_replayed_as_it_was(recorder: BrowserPool, replayer: BrowserPool) -> None:
    """Redirects of pages, styles and forms, cookies, posts, compression, fonts, copies, times and random numbers."""
    section, task = Action("navigate", url=f"{PAPER}/section"), task_of("whole")
    actions = [*web_actions(0, 1, 2), section, Action("navigate", url=f"{PAPER}/story/1"), Action("go_back"), section]
    recorded, text = await record(recorder, task, actions)
    shown = [each.screenshot for each in recorded]
    assert shown[-4] == shown[-2] != shown[-1]  # a copy of the cache, then another edition
    assert len(set(shown)) > 5
    asked, replayed = len(Handler.log), replayer.egress_proxy.totals.replayed
    assert await play(replayer, task, actions) == (recorded, text)
    assert {each.not_recorded_requests for each in recorded} == {0}
    assert len(Handler.log) == asked
    assert replayer.egress_proxy.totals.replayed > replayed + 40


async def test_whole_episodes_leave_recordings_without_credentials(recorder: BrowserPool, folder: Path) -> None:
    task, before = task_of("secret"), set(folder.iterdir())
    for number in range(2):
        async with recorder.episode(task) as (session, _):  # the site sets cookies
            post = "fetch('/api/upload', {method: 'POST', body: 'x', headers: {Authorization: 'Bearer 1'}})"
            await session.page.evaluate(post)
            assert len(set(folder.iterdir())) == len(before) + number  # a killed episode leaves no file
        await eventually(lambda: recorder.gauges()["sessions_in_use"] == 0)
    with pytest.raises(BrowserError):
        await play(recorder, replace(task, url="http://gone.invalid:9/"), [])
    await eventually(lambda: recorder.gauges()["sessions_in_use"] == 0)
    assert recorder.counters.failed_recordings == 0
    made = {visit_path(folder, task, number) for number in range(2)}
    assert set(folder.iterdir()) == before | made
    for path in made:
        assert path.stat().st_mode & 0o777 == 0o600
        with zipfile.ZipFile(path) as archive:
            entries = json.loads(archive.read(HAR_MEMBER))["log"]["entries"]
        sent = {header["name"].lower() for entry in entries for header in entry["request"]["headers"]}
        assert {"host", "content-length"} <= sent <= READ_REQUEST_HEADERS
        assert "visitor=" in str([entry["response"]["headers"] for entry in entries])  # pages read their cookies


async def test_other_actions_are_answered_or_counted(recorder: BrowserPool, replayer: BrowserPool) -> None:
    task = task_of("other")
    first, _ = await record(recorder, task, [MOVED, HOME_PAGE])
    unknown = Action("navigate", url=f"{PAPER}/story/999")
    seen, text = await play(replayer, task, [HOME_PAGE, MOVED, unknown, Action("go_back")])
    assert [each.not_recorded_requests for each in seen] == [0, 0, 0, 1, 1]
    assert seen[2].screenshot == seen[4].screenshot == first[1].screenshot
    assert f"GET {PAPER}/story/999 was not recorded (browser.replay)" in str(seen[3].error)
    assert text.startswith("Story")
    with pytest.raises(NotRecorded, match=r"the first page of web/other, .*/story/999, was not recorded"):
        await play(replayer, replace(task, url=f"{PAPER}/story/999"), [])
    assert replayer.egress_proxy.totals.refused["not_recorded"] == 2


async def test_https_is_replayed_without_its_host(recorder: BrowserPool, replayer: BrowserPool, folder: Path) -> None:
    task, actions = task_of("secure"), web_actions(3, 4)
    recorded, text = await record(recorder, task, actions)
    hosts = {"http://www.paper.test": "https://news.example", "http://media.paper.test": "https://m.example:8443"}
    rename_hosts(visit_path(folder, task, 0), hosts)
    actions = [replace(each, url=each.url and each.url.replace(PAPER, "https://news.example")) for each in actions]
    seen, again = await play(replayer, replace(task, url="https://news.example/"), actions)
    assert again == text
    assert [each.screenshot for each in seen] == [each.screenshot for each in recorded]  # its cache serves as before
    assert {each.url.split("/")[2] for each in seen} == {"news.example"}
    assert {each.not_recorded_requests for each in seen} == {0}


async def test_the_result_of_a_site_is_replayed(
    sites: dict[str, Any], recorder: BrowserPool, replayer: BrowserPool, reached: list[object]
) -> None:
    task, actions = sites["sites"].make_task("forms-vote", 3), []
    recordings = recorder.counters.recordings
    async with recorder.episode(task) as (session, observation):
        recorded = [observation]
        while not observation.done:
            actions.append(await sites["sites"].demonstrate(session.page, task))
            observation = await session.step(actions[-1])
            recorded.append(observation)
    await eventually(lambda: recorder.counters.recordings == recordings + 1)
    assert reached
    reached.clear()
    seen, _ = await play(replayer, task, actions)
    assert seen == recorded
    assert (seen[-1].reward, seen[-1].done) == (1.0, True)
    idle, _ = await play(replayer, task, [Action("wait", time=0.2)])
    assert (idle[-1].reward, idle[-1].done) == (None, False)
    assert not reached
