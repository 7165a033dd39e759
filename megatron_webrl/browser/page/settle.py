"""Wait until a page is idle after an action."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from megatron_webrl.browser.page.tabs import DocumentReplaced, Tab, page_script
from megatron_webrl.types import Scroll

LOAD_SECONDS = 10.0  # for a document to load
QUIET_LIMIT_MS = 1000  # after that, for a page that never stops changing, such as an endless animation
TIMER_MS = 14  # after the 13 ms of an animation of jQuery
BUBBLE_MS = 1300  # for Chromium's message about an invalid field to appear, which is no part of the document
NETWORK_IDLE_SECONDS = 3.0  # limit for all requests together, once nothing else changes
SETTLE_SECONDS = 15.0  # limit for a page that is replaced over and over
MAX_TITLE = 2000  # characters
MAX_URL = 4000

# A blinking caret would make two screenshots of the same page differ.
DISABLE_CARET_BLINK = """
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { caret-animation: manual !important; }");
  document.adoptedStyleSheets.push(sheet);
"""
_SCRIPT = page_script("settle")


@dataclass(frozen=True)
class SettledPage:
    """State of a page once it is idle, or at the time limit."""

    title: str
    url: str
    scroll: Scroll
    loading: bool = False  # still loading at the limit


async def wait_until_idle(tab: Tab, until: float | None = None, still: bool = False) -> SettledPage:
    """Wait until nothing loads and nothing changes, each within its limit. Raises PlaywrightError.

    No request may end meanwhile: a page that makes one request after the other has none pending between them.
    `until`: deadline on the event loop's clock for a page replaced over and over; None: SETTLE_SECONDS from now.
    `still`: end the animations of the page's styles, so that the same page looks the same at any time.
    """
    clock = asyncio.get_running_loop().time
    limit, network_seconds = clock() + SETTLE_SECONDS if until is None else until, NETWORK_IDLE_SECONDS
    limits = {
        "quietLimit": QUIET_LIMIT_MS, "timer": TIMER_MS, "bubbleLimit": BUBBLE_MS, "maxTitle": MAX_TITLE,
        "maxURL": MAX_URL, "still": still,
    }  # fmt: skip
    while True:
        loaded = await _loaded(tab, min(LOAD_SECONDS, max(0.0, limit - clock())))
        started, ended = clock(), tab.ended_requests
        try:
            title, url, *scroll = await tab.evaluate(_SCRIPT, limits)
        except DocumentReplaced:
            if clock() < limit:
                continue  # with the next document
            return SettledPage("", tab.page.url[:MAX_URL], Scroll(0, 0, 0), loading=True)
        if not loaded or clock() >= limit:
            return SettledPage(title, url, Scroll(*scroll), loading=not loaded)
        if not tab.loaded.is_set():
            continue
        if (tab.requests_done.is_set() and tab.ended_requests == ended) or network_seconds <= 0:
            return SettledPage(title, url, Scroll(*scroll))
        await tab.wait_for_requests(network_seconds)
        network_seconds -= clock() - started


async def _loaded(tab: Tab, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(tab.loaded.wait(), seconds)
    return tab.loaded.is_set()
