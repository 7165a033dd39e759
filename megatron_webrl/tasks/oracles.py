"""Scripted solvers of some MiniWoB++ environments, which look at the page's elements instead of its pixels.

Each is a JavaScript expression over the page's state that names what to do: an element to click, a point within
one, or a text to type into one. Coordinates are multiples of STEP wherever such a point hits the element.
"""

from __future__ import annotations

from typing import Any

from playwright.async_api import Page

from megatron_webrl.types import COORDINATE_RANGE, Action

STEP = 20  # few different coordinates are easier to learn

# For each environment the target of the next action: {element}, {element, at: [x, y] in pixels} or {element, text}.
_TARGETS = {
    "click-test": "{element: $('#subbtn')}",
    "click-test-2": "{element: $('#subbtn')}",
    "click-dialog": "{element: $('button.ui-button')}",
    "click-button": r"""{element: all('#area button').find(b => b.innerHTML === query().match(/"(.*)"/)[1])}""",
    "focus-text": "{element: $('#tt')}",
    "focus-text-2": r"{element: all('#area input')[Number(query().match(/(\d)(st|nd|rd)/)[1]) - 1]}",
    "click-collapsible": """{element: shown('.ui-accordion-content') ? $('#subbtn') : $('#area h3')}""",
    "click-tab": r"""{element: all('#area ul a').find(a => query().includes(a.textContent))}""",
    "click-color": r"""{element: $(`#area [data-color="${core.getUtterance().match(/the (\S+) colored/)[1]}"]`)}""",
    "circle-center": """$('#blue-circle') ? {element: $('#subbtn')}
      : {element: $('#svg-grid'), at: middle($('.black-circle')), within: 4}""",
    "click-button-sequence": "{element: buttonsPushed.length ? $('#subbtn2') : $('#subbtn')}",
    "enter-text": r"""$('#tt').value === $('#query .bold').textContent ? {element: $('#subbtn')}
      : {element: $('#tt'), text: $('#query .bold').textContent}""",
    "grid-coordinate": "{element: document.getElementById($('#query .bold').textContent)}",
}

# Finds the coordinate nearest to the aim that hits the element (its own pixels on top), preferring multiples of STEP;
# `within` bounds the distance from the aim in pixels.
_FIND = """({range, step}) => {
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


def environments() -> tuple[str, ...]:
    """The environments that an oracle solves."""
    return tuple(_TARGETS)


async def next_action(page: Page, environment: str) -> Action:
    """What solves the environment from where the page is. Raises OracleError, KeyError for an unknown one."""
    script = _FIND.replace("TARGET", f"({_TARGETS[environment]})")
    found: dict[str, Any] = await page.evaluate(script, {"range": COORDINATE_RANGE, "step": STEP})
    if "problem" in found:
        raise OracleError(f"{environment}: {found['problem']}")
    x, y = found["coordinate"]
    text = found.get("text")
    return Action("left_click" if text is None else "type", coordinate=(int(x), int(y)), text=text)
