"""What a script does on a page of the sites: follow a link, submit a form, answer.

A move names elements as the page does, so that a browser and a plain HTTP client can both carry it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Page

from megatron_webrl.tasks.click_target import ScriptedPolicyError, resolve_target
from megatron_webrl.types import Action


@dataclass(frozen=True)
class FollowLink:
    """Click the link with this address."""

    href: str


@dataclass(frozen=True)
class SubmitForm:
    """Fill in fields of the form with this action, the others stay as they are, and press its button."""

    action: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GiveAnswer:
    """End the task with a text."""

    text: str


HighLevelAction = FollowLink | SubmitForm | GiveAnswer


@dataclass(frozen=True)
class PageLinks:
    """What a script sees of the page: its address and those of its links."""

    path: str  # with the query
    links: frozenset[str]


ScriptedPolicy = Callable[[Any, PageLinks], HighLevelAction]
"""From an episode's copy of the site (a subclass of App) and the page to the next move. Raises OracleError."""


def next_link(look: PageLinks, *way: str) -> FollowLink | None:
    """The next link on a way of pages, each linked from the one before; None at its end.

    Wherever the agent is, the last page of the way that is linked there is the next one. Raises OracleError.
    """
    if look.path == way[-1]:
        return None
    for href in reversed(way):
        if href in look.links and href != look.path:
            return FollowLink(href)
    raise ScriptedPolicyError(f"{look.path} leads nowhere on the way to {way[-1]}")


def next_unvisited(seen: Collection[str], look: PageLinks, *stops: str) -> FollowLink | None:
    """Like `walk`, but every stop must have been seen, none is jumped over; None once all are."""
    for index, stop in enumerate(stops):
        if stop not in seen:
            return next_link(look, *stops[: index + 1])
    return None


# The field to fill in next: those that are clicked come first, because Enter in a text field may send the form.
_TARGET = """(() => {
  if (argument.href !== undefined)
    return {element: all('a[href]').find((a) => a.getAttribute('href') === argument.href)};
  const form = all('form').find((f) => f.getAttribute('action') === argument.action);
  if (!form) return {};
  const wanted = Object.entries(argument.values);
  const inputs = (name) => [...form.elements].filter((e) => e.name === name);
  for (const [name, value] of wanted) for (const e of inputs(name)) {
    if (e.type === 'radio' && e.value === value && !e.checked) return {element: e.closest('label') || e};
    if (e.type === 'checkbox' && e.checked !== (e.value === value)) return {element: e.closest('label') || e};
  }
  for (const [name, value] of wanted) for (const e of inputs(name))
    if (e.type !== 'radio' && e.type !== 'checkbox' && e.value.trim() !== value) return {element: e, text: value};
  return {element: form.querySelector('button')};
})()"""

_LOOK = """() => [location.pathname + location.search,
  [...document.querySelectorAll('a[href]')].map((a) => a.getAttribute('href'))]"""


async def read_page_links(page: Page) -> PageLinks:
    """What a script sees of a page in the browser."""
    path, links = await page.evaluate(_LOOK)
    return PageLinks(path, frozenset(links))


async def first_action(page: Page, move: HighLevelAction) -> Action:
    """The first action of a move on a page in the browser. Raises OracleError."""
    match move:
        case GiveAnswer(text):
            return Action("answer", text=text)
        case FollowLink(href):
            return await resolve_target(page, _TARGET, {"href": href})
        case SubmitForm(action, values):
            return await resolve_target(page, _TARGET, {"action": action, "values": dict(values)})
