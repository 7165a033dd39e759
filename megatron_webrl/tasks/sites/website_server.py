"""The server of the offline websites, and the scripts that do their tasks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.config.tasks import LatencyConfig
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.latency import EpisodeDelays, ResponseDelays
from megatron_webrl.tasks.server import LocalServer, PageRequest, PageResponse
from megatron_webrl.tasks.sites.high_level_actions import HighLevelAction, first_action, read_page_links
from megatron_webrl.tasks.sites.questions import website_goals
from megatron_webrl.tasks.sites.site_task_source import SITE_APPS, SiteVisit
from megatron_webrl.tasks.sites.websites import (
    BarCode,
    Website,
    digest,
    draw_bar_code,
    effects_digest,
    get_website,
    is_offline_host,
    offline_host,
    page_digest,
    page_key,
)
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Action, Task

if TYPE_CHECKING:
    from playwright.async_api import Page

VISITOR_COOKIE = "visitor"
MAX_VISITORS = 1024  # the one that has been idle longest is forgotten first
_DENIED = Path(__file__).with_name("templates").joinpath("denied.html").read_bytes()


class Visitor(SiteVisit):
    """One browser context's copy of a website; pages carry a bar code."""

    def __init__(self, website: Website, delays: ResponseDelays) -> None:
        """A refusal is a function of the name of the episode, as the delays are."""
        super().__init__(website.app_class(website.data, website.start), delays)
        self.website = website
        self.denied = digest(delays.episode, 7) / 2**56 < website.denial_probability

    def _answer(self, request: PageRequest) -> PageResponse:
        response = PageResponse(403, _DENIED) if self.denied else self.app.handle_request(request)
        before, end, after = response.body.rpartition(b"</body>")
        if not end:  # without a page
            return response
        page = page_digest(page_key(self.website.host, request.path, request.query))
        code = draw_bar_code(BarCode(page, effects_digest(self.app.effects), self.denied))
        return replace(response, body=b"".join((before, code.encode(), end, after)))


class OfflineWebsites(OpenWeb):
    """All offline websites behind one local server, which starts when `addresses` is first read; `close` stops it."""

    def __init__(self, latency: LatencyConfig | None = None, max_steps: int = 10, open_web: bool = False) -> None:
        """`open_web`: whether tasks may begin on other hosts, too."""
        super().__init__(max_steps)
        self._open_web = open_web
        self._server = LocalServer(self._respond, "offline-websites")
        self._delays = EpisodeDelays(latency or LatencyConfig())
        self._lock = threading.Lock()
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()  # by secret, longest idle first

    @property
    def origins(self) -> frozenset[str]:
        """The origins of all websites, with `*` in place of their numbers."""
        return frozenset(f"http://{site}-*.localhost" for site in SITE_APPS)

    @property
    def addresses(self) -> dict[str, str]:
        return {f"{site}-*.localhost": self._server.address for site in SITE_APPS}

    def opens(self, url: str) -> bool:
        return self._open_web or offline_host(url) is not None

    def close(self) -> None:
        """Stop the server."""
        self._server.close()

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """The next scripted action. Raises ScriptedPolicyError, and KeyError for another task or `premature_submit`."""
        if premature_submit:
            raise KeyError(task.environment)
        return await first_action(page, await self.next_move(page, task))

    async def next_move(self, page: Page, task: Task) -> HighLevelAction:
        """The next action of a task's script. Raises ScriptedPolicyError; KeyError for a task of no website."""
        host = offline_host(task.url)
        if host is None:
            raise KeyError(task.environment)
        wanted, visitor = website_goals(host).get(task.instruction or ""), await self.visitor_of(page, host)
        if wanted is None:
            raise ScriptedPolicyError(f"{task.id}: {host} has no scripted policy for its instruction")
        if offline_host(page.url) != host or visitor is None:
            raise ScriptedPolicyError(f"{task.id}: {page.url[:200]} is not a page of {host}")
        if visitor.denied:
            raise ScriptedPolicyError(f"{task.id}: {host} denies access")
        try:
            return visitor.next_move(wanted.goal.scripted_policy, await read_page_links(page))
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
        with self._lock:
            visitor = self._visitors.get(request.cookies.get(VISITOR_COOKIE, ""))
            if visitor is not None and visitor.website.host == request.host:
                self._visitors.move_to_end(visitor.secret)
            else:
                visitor = None
        if visitor is not None:
            return visitor.handle_request(request)
        website = get_website(request.host)
        with self._lock:
            visitor = Visitor(website, self._delays.start(request.host))
            self._visitors[visitor.secret] = visitor
            if len(self._visitors) > MAX_VISITORS:
                self._visitors.popitem(last=False)
        response = visitor.handle_request(request)
        cookie = f"{VISITOR_COOKIE}={visitor.secret}; Path=/; HttpOnly"
        return replace(response, headers={**response.headers, "Set-Cookie": cookie})
