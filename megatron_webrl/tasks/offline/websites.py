"""Offline websites of WebGym's format: hosts, pages, bar codes.

Bar code on the pages of offline websites: says which page a screenshot shows, and what has been done there.

A strip of 16 x 4 black and white cells of 8 x 8 pixels at the bottom right of the viewport, above everything else. It
is legible in JPEG screenshots of quality 80 and in any viewport of at least 160 x 224 pixels. 64 bits, from the top
left, row by row, white is 1:

    4 format | 32 page digest | 16 effects digest | 3 reserved, 0 | 1 access denied | 8 checksum of the other 56
"""

from __future__ import annotations

import binascii
import hashlib
import io
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from megatron_webrl.config.tasks import LatencyConfig
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.latency import EpisodeDelays, ResponseDelays
from megatron_webrl.tasks.offline.hosts import Website, get_website, is_offline_host, offline_host, page_key
from megatron_webrl.tasks.offline.questions import website_goal
from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.tasks.sites.app import Effect, Html
from megatron_webrl.tasks.sites.goal import Goal
from megatron_webrl.tasks.sites.high_level_actions import HighLevelAction, PageLinks, first_action, read_page_links
from megatron_webrl.tasks.sites.site_task_source import SITE_APPS
from megatron_webrl.types import Action, Task

if TYPE_CHECKING:
    from playwright.async_api import Page


COLUMNS, ROWS, CELL_PIXELS = 16, 4, 8
_FORMAT = 0b1010
_CRC_START = 0x5A  # not 0: plain areas of one colour must not pass
_MARGIN = 2  # pixels of a cell's edge that are not sampled
_DARK, _BRIGHT = 80, 175  # grey levels


@dataclass(frozen=True)
class BarCode:
    """The content of a bar code."""

    page: int  # `page_digest`
    effects: int  # `effects_digest`
    denied: bool = False  # the website has refused the agent


def page_digest(page: str) -> int:
    """32 bits of a page's key: host, path and query."""
    return _digest(page, 4)


def effects_digest(effects: Iterable[tuple[str, ...]]) -> int:
    """16 bits of a multiset of effects; 0 if there are none."""
    listed = sorted("\x1f".join(effect) for effect in effects)
    return (_digest("\x1e".join(listed), 2) or 1) if listed else 0


def draw_bar_code(code: BarCode) -> Html:
    """The bar code as SVG that takes no clicks and that assistive technology does not see."""
    cells = [(index % COLUMNS, index // COLUMNS) for index, bit in enumerate(_bits(code)) if not bit]
    path = "".join(f"M{x} {y}h1v1h-1z" for x, y in cells)
    width, height = COLUMNS * CELL_PIXELS, ROWS * CELL_PIXELS
    return Html(
        '<svg aria-hidden="true" style="position:fixed;right:0;bottom:0;z-index:2147483647;pointer-events:none" '
        f'width="{width}" height="{height}" viewBox="0 0 {COLUMNS} {ROWS}" shape-rendering="crispEdges">'
        f'<rect width="{COLUMNS}" height="{ROWS}" fill="#fff"/><path d="{path}" fill="#000"/></svg>'
    )


def read_bar_code(image: bytes) -> BarCode | None:
    """The bar code of an encoded screenshot in its original size; None without a legible one."""
    try:
        with Image.open(io.BytesIO(image)) as opened:
            width, height = opened.size
            box = (width - COLUMNS * CELL_PIXELS, height - ROWS * CELL_PIXELS, width, height)
            if min(box) < 0:
                return None
            pixels = np.asarray(opened.convert("L").crop(box), np.float32)
    except OSError:
        return None
    cells = pixels.reshape(ROWS, CELL_PIXELS, COLUMNS, CELL_PIXELS)[:, _MARGIN:-_MARGIN, :, _MARGIN:-_MARGIN]
    levels = cells.mean((1, 3)).ravel()
    if ((levels > _DARK) & (levels < _BRIGHT)).any():
        return None
    return _parse(int("".join("1" if level >= _BRIGHT else "0" for level in levels), 2).to_bytes(8, "big"))


def _bits(code: BarCode) -> list[int]:
    value = (((_FORMAT << 32 | code.page) << 16 | code.effects) << 4) | int(code.denied)
    content = value.to_bytes(7, "big")
    return [int(bit) for byte in (*content, _checksum(content)) for bit in f"{byte:08b}"]


def _parse(content: bytes) -> BarCode | None:
    value = int.from_bytes(content[:7], "big")
    if content[7] != _checksum(content[:7]) or value >> 52 != _FORMAT or value & 0b1110:
        return None
    return BarCode(page=(value >> 20) & 0xFFFFFFFF, effects=(value >> 4) & 0xFFFF, denied=bool(value & 1))


def _checksum(content: bytes) -> int:
    return binascii.crc_hqx(content, _CRC_START) & 0xFF


def _digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")


VISITOR_COOKIE = "visitor"
MAX_VISITORS = 1024  # the one that has been idle longest is forgotten first
MAX_COUNTED_HOSTS = 4096
_DENIED = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Access denied</title>
<link rel="icon" href="data:,"><style>body{font:16px/1.5 "DejaVu Sans",Arial,sans-serif;margin:40px auto;
max-width:560px;padding:0 20px}.check{border:1px solid #b9c1c7;padding:14px 18px;border-radius:4px}</style></head>
<body><h1>Access denied</h1><p>Our systems have detected unusual traffic from your network. Confirm that you are not a
robot to continue.</p><p class="check">&#9744; I am not a robot</p><p>The CAPTCHA could not be loaded.</p></body></html>
"""


class Visitor:
    """One browser context's copy of a website. Thread-safe."""

    def __init__(self, website: Website, delays: ResponseDelays) -> None:
        """A refusal is a function of the name of the episode, as the delays are."""
        self.website = website
        self.denied = _uniform(delays.episode) < website.denial_probability
        self.secret = secrets.token_urlsafe(18)
        self._app = website.app_class(website.data, website.start)
        self._delays = delays
        self._lock = threading.Lock()

    def handle_request(self, request: PageRequest) -> PageResponse:
        """Answer a request; pages carry a bar code."""
        with self._lock:
            delay = self._delays.next()
            response = PageResponse(403, _DENIED.encode()) if self.denied else self._app.handle_request(request)
            page = page_key(self.website.host, request.path, request.query)
            code = BarCode(page_digest(page), effects_digest(self._app.effects), self.denied)
        body = _with_bar_code(response.body, code)
        return PageResponse(response.status, body, response.content_type, response.headers, delay)

    def next_move(self, goal: Goal, view: PageLinks) -> HighLevelAction:
        """The next action of the goal's scripted policy on a page. Raises ScriptedPolicyError."""
        if self.denied:
            raise ScriptedPolicyError(f"{self.website.host} denies access")
        with self._lock:
            return goal.scripted_policy(self._app, view)

    @property
    def effects(self) -> list[Effect]:
        """The visitor's lasting changes, in order."""
        with self._lock:
            return list(self._app.effects)


class OfflineWebsites:
    """All offline websites behind one local server, which starts when `addresses` is first read; `close` stops it."""

    def __init__(self, latency: LatencyConfig | None = None) -> None:
        self._server = LocalServer(self._respond, "offline-websites")
        self._delays = EpisodeDelays(latency or LatencyConfig(), MAX_COUNTED_HOSTS)
        self._lock = threading.Lock()
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()  # by secret, longest idle first

    @property
    def origins(self) -> frozenset[str]:
        """The origins of all websites, with `*` in place of their numbers."""
        return frozenset(f"http://{site}-*.localhost" for site in SITE_APPS)

    @property
    def addresses(self) -> dict[str, str]:
        return {f"{site}-*.localhost": self._server.address for site in SITE_APPS}

    def serves(self, url: str) -> bool:
        """Whether a URL is of one of these websites."""
        return offline_host(url) is not None

    def close(self) -> None:
        """Stop the server."""
        self._server.close()

    async def demonstrate(self, page: Page, task: Task) -> Action:
        """The next scripted action. Raises ScriptedPolicyError, and KeyError if the task is none of these websites."""
        return await first_action(page, await self.next_move(page, task))

    async def next_move(self, page: Page, task: Task) -> HighLevelAction:
        """The next high-level action of the task's script; errors as for `demonstrate`."""
        host = offline_host(task.url)
        if host is None:
            raise KeyError(task.environment)
        goal = website_goal(host, task.instruction or "").goal
        visitor = await self.visitor_of(page, host)
        if offline_host(page.url) != host or visitor is None:
            raise ScriptedPolicyError(f"{task.id}: {page.url[:200]} is not a page of {host}")
        try:
            return visitor.next_move(goal, await read_page_links(page))
        except ScriptedPolicyError as error:
            raise ScriptedPolicyError(f"{task.id}: {error}") from error

    async def visitor_of(self, page: Page, host: str) -> Visitor | None:
        """The visitor of a host that a page's browser context is; None if it has not been there."""
        for cookie in await page.context.cookies(f"http://{host}/"):
            if cookie.get("name") == VISITOR_COOKIE:
                with self._lock:
                    return self._visitors.get(cookie.get("value", ""))
        return None

    def _respond(self, request: PageRequest) -> PageResponse:
        if not is_offline_host(request.host):
            return PageResponse(404, b"There is no website here.", "text/plain; charset=utf-8")
        visitor = self._find_visitor(request)
        if visitor is not None:
            return visitor.handle_request(request)
        visitor = self._new_visitor(request.host)
        response = visitor.handle_request(request)
        cookie = {"Set-Cookie": f"{VISITOR_COOKIE}={visitor.secret}; Path=/; HttpOnly"}
        return PageResponse(
            response.status, response.body, response.content_type, {**response.headers, **cookie}, response.delay
        )

    def _find_visitor(self, request: PageRequest) -> Visitor | None:
        with self._lock:
            visitor = self._visitors.get(request.cookies.get(VISITOR_COOKIE, ""))
            if visitor is None or visitor.website.host != request.host:
                return None
            self._visitors.move_to_end(visitor.secret)
            return visitor

    def _new_visitor(self, host: str) -> Visitor:
        website = get_website(host)
        with self._lock:
            visitor = Visitor(website, self._delays.start(host))
            self._visitors[visitor.secret] = visitor
            if len(self._visitors) > MAX_VISITORS:
                self._visitors.popitem(last=False)
        return visitor


def _with_bar_code(body: bytes, code: BarCode) -> bytes:
    """A page with the bar code at its end; a response without a page stays as it is."""
    before, end, after = body.rpartition(b"</body>")
    return b"".join((before, draw_bar_code(code).encode(), end, after)) if end else body


def _uniform(text: str) -> float:
    """A number in [0, 1) by hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56
