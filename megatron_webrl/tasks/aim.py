"""Where to click, for scripts that know the element: the coordinate of an action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_webrl.types import COORDINATE_RANGE, Action

if TYPE_CHECKING:
    from playwright.async_api import Page

STEP = 20  # few different coordinates are easier to learn

# Finds the coordinate nearest to the aim that hits the element (its own pixels on top), preferring multiples of STEP;
# `within` bounds the distance from the aim in pixels. An element outside the viewport is scrolled to.
_FIND = """({range, step, argument}) => {
  const $ = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const query = () => $('#query').textContent;
  const shown = (selector) => all(selector).some((e) => e.offsetHeight > 0);
  const middle = (e) => { const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; };
  const target = TARGET;
  const element = target.element;
  if (!element) return {problem: 'the element to act on is not on the page'};
  const box = element.getBoundingClientRect();
  const [aimX, aimY] = target.at || middle(element);
  if (aimY < 0) return {scroll: 'up'};
  if (aimY >= innerHeight) return {scroll: 'down'};
  const reach = target.within || Infinity;
  const nearest = (spacing) => {
    let best = null, least = Infinity;
    const cells = (low, high, size) => {
      const first = Math.max(0, Math.ceil(low * range / size / spacing));
      const last = Math.min(range / spacing, Math.floor(high * range / size / spacing));
      return Array.from({length: Math.max(0, last - first + 1)}, (_, i) => (first + i) * spacing);
    };
    for (const x of cells(box.left, box.right, innerWidth)) for (const y of cells(box.top, box.bottom, innerHeight)) {
      const px = Math.min(x * innerWidth / range, innerWidth - 1);
      const py = Math.min(y * innerHeight / range, innerHeight - 1);
      const distance = Math.hypot(px - aimX, py - aimY);
      if (distance >= least || distance > reach) continue;
      const hit = document.elementFromPoint(px, py);
      if (hit && element.contains(hit)) { best = [x, y]; least = distance; }
    }
    return best;
  };
  const coordinate = nearest(step) || nearest(1);
  return coordinate ? {coordinate, text: target.text} : {problem: 'no visible point of the element can be clicked'};
}"""


class OracleError(RuntimeError):
    """The page does not allow what the oracle wants; the episode cannot be demonstrated."""


async def aim(page: Page, target: str, argument: Any = None) -> Action:
    """A click, a text to type, or a scroll towards the element that `target` names. Raises OracleError.

    `target` is a JavaScript expression over the page and `argument`: {element}, {element, at: [x, y] in pixels} or
    {element, text}.
    """
    script = _FIND.replace("TARGET", f"({target})")
    asked = {"range": COORDINATE_RANGE, "step": STEP, "argument": argument}
    found: dict[str, Any] = await page.evaluate(script, asked)
    if "problem" in found:
        raise OracleError(str(found["problem"]))
    if "scroll" in found:
        return Action("scroll", direction=found["scroll"])
    x, y = found["coordinate"]
    text = found.get("text")
    return Action("left_click" if text is None else "type", coordinate=(int(x), int(y)), text=text)
