"""Wait until a page is idle after an action."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from megatron_webrl.browser.page.tabs import DocumentReplaced, Tab
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

# A form named "title" shadows document.title; the getters of the prototype cannot be shadowed.
_NATIVE = "const native = (name) => Object.getOwnPropertyDescriptor(Document.prototype, name).get.call(document);"

# Shows the end of an animation that has one, and the beginning of an endless one; returns whether that was a change.
# A time that is set while the pause is pending may never be painted.
_END_ANIMATION = """const endAnimation = (animation) => {
    if (animation.timeline !== document.timeline || !animation.effect || !animation.playbackRate) return false;
    if (animation.effect.getComputedTiming().endTime !== Infinity) {
      if (animation.playState === "finished") return false;
      animation.finish();
      return true;
    }
    if (animation.playState !== "paused") animation.pause();
    else if (!animation.pending && animation.currentTime === 0) return false;
    else if (!animation.pending) animation.currentTime = 0;
    return true;
  };"""

# Resolves to [title, URL, scrollX, scrollY, page height] once the document is complete and two animation frames in a
# row have passed without a change of the document or a scroll: the first frame lets handlers run, the second has
# painted their changes. Between them a timer must have run: on a busy machine frames overtake the timers that an
# animation by script is made of. A later timer replaces animation frames that never come, as in a page that is being
# replaced.
_SETTLE = f"""(quietLimit, still) => new Promise((resolve) => {{
  {_NATIVE}
  {_END_ANIMATION}
  const start = performance.now();
  let moved = false, quiet = 0;
  const mark = () => {{ moved = true; }};
  const observer = new MutationObserver(mark);
  observer.observe(document, {{subtree: true, childList: true, attributes: true, characterData: true}});
  addEventListener("scroll", mark, true);
  const finish = () => {{
    observer.disconnect();
    removeEventListener("scroll", mark, true);
    const root = native("scrollingElement") || native("documentElement");
    resolve([native("title").slice(0, {MAX_TITLE}), location.href.slice(0, {MAX_URL}),
             Math.round(scrollX), Math.round(scrollY), root ? root.scrollHeight : 0]);
  }};
  const next = () => {{
    let pending = quiet ? 2 : 1;
    const pass = () => {{ pending -= 1; if (!pending) frame(); }};
    requestAnimationFrame(pass);
    if (quiet) setTimeout(pass, {TIMER_MS});
    setTimeout(() => {{ if (pending > 0) {{ pending = 0; frame(); }} }}, 200);
  }};
  const frame = () => {{
    const ready = native("readyState") === "complete";
    const waited = performance.now() - start;
    if (still && document.getAnimations().filter(endAnimation).length) moved = true;
    const field = native("activeElement");
    const bubble = still && waited < {BUBBLE_MS} && field && field.matches(":invalid");
    quiet = ready && !moved && !bubble ? quiet + 1 : 0;
    moved = false;
    if (quiet >= 2 || !bubble && waited > quietLimit) finish(); else next();
  }};
  next();
}})"""

# Length of the focused text field's content in characters; null if no text field has the focus.
FOCUSED_TEXT_LENGTH = f"""() => {{
  {_NATIVE}
  let element = native("activeElement");
  while (element && element.shadowRoot && element.shadowRoot.activeElement) element = element.shadowRoot.activeElement;
  if (!element) return null;
  if (element.tagName === "IFRAME") return 1;
  if (element.isContentEditable) return element.textContent.length;
  const plain = ["text", "search", "url", "tel", "email", "password", "number", "date", "time", "month", "week",
                 "datetime-local"];
  const takesText = element.tagName === "TEXTAREA" || (element.tagName === "INPUT" && plain.includes(element.type));
  return takesText && !element.readOnly && !element.disabled ? element.value.length : null;
}}"""


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
    while True:
        loaded = await _loaded(tab, min(LOAD_SECONDS, max(0.0, limit - clock())))
        started, ended = clock(), tab.ended_requests
        try:
            script = f"() => ({_SETTLE})({QUIET_LIMIT_MS}, {str(still).lower()})"
            title, url, *scroll = await tab.evaluate(script)
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
