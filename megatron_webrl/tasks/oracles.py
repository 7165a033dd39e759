"""Scripted solvers of some MiniWoB++ environments, which look at the page's elements instead of its pixels.

Each is a JavaScript expression over the page's state that names what to do: an element to click, a point within
one, or a text to type into one.
"""

from __future__ import annotations

from playwright.async_api import Page

from megatron_webrl.tasks.aim import OracleError, aim
from megatron_webrl.types import Action

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


def environments() -> tuple[str, ...]:
    """The environments that an oracle solves."""
    return tuple(_TARGETS)


async def next_action(page: Page, environment: str) -> Action:
    """What solves the environment from where the page is. Raises OracleError, KeyError for an unknown one."""
    try:
        return await aim(page, _TARGETS[environment])
    except OracleError as error:
        raise OracleError(f"{environment}: {error}") from error
