"""A web site on this machine that behaves like a public one, for recording and replay.

Every response differs from the last: stories, numbers and pictures come from a counter. Its pages redirect, set
cookies, load styles, scripts, a font and pictures from a second host, compressed, cached and revalidated, show the time
and random numbers, put both into the URLs they request, post forms, JSON and blobs, give a request up, and are never at
rest.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import matplotlib
from PIL import Image

from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Task

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


def web_task(number: int) -> Task:
    """The number-th task on the site; all begin on its first page."""
    return Task(
        id=f"web/paper/{number}", source="web", environment="page", seed=0, max_steps=8, instruction="read", url=START
    )


def web_actions(number: int) -> list[Action]:
    """What an agent does in the number-th task: fixed actions, in an order that depends on the number."""
    actions = [
        [Action("left_click", coordinate=QUOTE), Action("left_click", coordinate=QUOTE)],
        [Action("left_click", coordinate=SEARCH), Action("type", text=f"word {number}")],
        [Action("navigate", url=START), Action("left_click", coordinate=STORY), Action("go_back")],
        [Action("scroll", direction="down"), Action("navigate", url=f"{PAPER}/moved")],
        [Action("left_click", coordinate=WIDGET)],
        [
            Action("navigate", url=f"{PAPER}/section"),
            Action("left_click", coordinate=STORY),
            Action("go_back"),
            Action("navigate", url=f"{PAPER}/section"),
        ],
    ]
    turn = number % len(actions)
    return [action for group in [*actions[turn:], *actions[:turn]][:3] for action in group]


class ChangingWeb(OpenWeb):
    """The open web, of which only the changing site exists. `close` stops its server."""

    def __init__(self, max_steps: int = 8) -> None:
        super().__init__(max_steps)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._address = f"127.0.0.1:{self._server.server_address[1]}"
        self.requests = self._server.log  # "METHOD path", of all requests
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.count = itertools.count(1)
        self.log: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        number, path = next(self.server.count), urlsplit(self.path).path
        self.server.log.append(f"{self.command} {self.path}")
        if path == "/":
            expires = formatdate(time() + 3600, usegmt=True)
            self._send(302, {"Location": f"/home/{number}#top", "Set-Cookie": f"visitor={number}; Expires={expires}"})
        elif path == "/moved":
            self._send(301, {"Location": f"{PAPER}/story/{number}"})
        elif path.startswith("/home/"):
            self._send(200, body=HOME.format(number=number, media=MEDIA))
        elif path.startswith("/story/"):
            written = formatdate(time() - 3600, usegmt=True)
            self._send(200, {"Last-Modified": written}, ARTICLE.format(number=number))
        elif path == "/section":
            self._send(200, body=SECTION.format(number=number))
        elif path == "/app.js":
            self._send(200, {"Content-Type": "text/javascript"}, SCRIPT, compress=True)
        elif path == "/api/quote":
            callback = parse_qs(urlsplit(self.path).query)["callback"][0]
            self._send(200, {"Content-Type": "text/javascript"}, f"{callback}('quote {number}')")
        elif path == "/api/edition":
            self._send(200, {"Content-Type": "text/plain", "Cache-Control": "max-age=600"}, str(number))
        elif path == "/api/named":
            self._send(200, {"Content-Type": "text/plain", "X-Name": UTF8_HEADER})
        elif path in ("/api/never", "/api/half"):
            self._send_never(path == "/api/half")
        elif path == "/results":
            words = parse_qs(urlsplit(self.path).query)["words"][0]
            self._send(200, body=f"<!DOCTYPE html><title>Results</title><p>{number} results for {words}")
        else:
            self._send_media(path, number)

    def do_POST(self) -> None:
        number, text = next(self.server.count), self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.log.append(f"{self.command} {self.path}")
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

    def _send_media(self, path: str, number: int) -> None:
        if path == "/latest/style.css":
            self._send(302, {"Location": "/v3/style.css"})
        elif path == "/v3/style.css":
            self._send(200, {"Content-Type": "text/css", "Cache-Control": "max-age=600"}, STYLE, compress=True)
        elif path == "/v3/fonts/press.ttf":
            font = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSerif.ttf"
            self._send(200, {"Access-Control-Allow-Origin": "*", "Content-Type": "font/ttf"}, font.read_bytes())
        elif path == "/widget":
            self._send(
                200,
                body=f"<button onclick='this.textContent=Math.random()'>w{number}</button><script>"
                "document.body.append(new Date().getSeconds(), ' ', Math.random())</script>",
            )
        elif path == "/mark.png" and self.headers["If-None-Match"]:
            self._send(304, {"ETag": '"mark"'})
        elif path == "/mark.png":
            self._send(200, {"Content-Type": "image/png", "ETag": '"mark"', "Cache-Control": "no-cache"}, _picture(7))
        elif path == "/turning.gif":
            self._send(200, {"Content-Type": "image/gif"}, _animation())
        elif path.endswith(".png"):
            self._send(200, {"Content-Type": "image/png"}, _picture(number))
        else:
            self._send(404, body="nothing here")

    def _send(
        self, status: int, headers: dict[str, str] | None = None, body: str | bytes = b"", compress: bool = False
    ) -> None:
        content = body.encode() if isinstance(body, str) else body
        content = gzip.compress(content) if compress else content
        fields = {"Content-Type": "text/html; charset=utf-8", **(headers or {})}
        if compress:
            fields["Content-Encoding"] = "gzip"
        try:
            self.send_response(status)
            for name, value in fields.items():
                self.send_header(name, value)
            if status != 304:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            self.close_connection = True  # the page was closed while it loaded

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _picture(number: int) -> bytes:
    """A PNG whose colours depend on the number."""
    image, file = Image.linear_gradient("L").resize((64, 48)).rotate(number * 37 % 360), io.BytesIO()
    Image.merge("RGB", (image, image.rotate(number * 11 % 360), image.rotate(180))).save(file, "PNG")
    return file.getvalue()


def _animation() -> bytes:
    """An endless GIF of two colours."""
    file, frames = io.BytesIO(), [Image.new("P", (32, 32), colour) for colour in (1, 2, 3)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=90, loop=0)
    return file.getvalue()
