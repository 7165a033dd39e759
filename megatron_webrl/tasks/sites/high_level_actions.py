"""Actions of scripted policies on the sites: follow a link, submit a form, answer.

They name elements by href, form action and field name, so that a browser and a plain HTTP client can execute them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.tasks.click_target import ScriptedPolicyError, read_page, resolve_target
from megatron_webrl.types import Action

if TYPE_CHECKING:
    from playwright.async_api import Page


@dataclass(frozen=True)
class FollowLink:
    """Click the link with this href."""

    href: str


@dataclass(frozen=True)
class SubmitForm:
    """Fill in the given fields of the form with this action and press its button."""

    action: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GiveAnswer:
    """End the task with an answer."""

    text: str


HighLevelAction = FollowLink | SubmitForm | GiveAnswer


@dataclass(frozen=True)
class PageLinks:
    """The path of a page and the hrefs of its links."""

    path: str  # with the query
    links: frozenset[str]


ScriptedPolicy = Callable[[Any, PageLinks], HighLevelAction]  # of App and page; raises ScriptedPolicyError


def next_link(view: PageLinks, *pages: str) -> FollowLink | None:
    """The next link on a path of pages, each linked from the previous one; None on the last page.

    From any page, the link leads to the farthest page of the path that is linked there. Raises ScriptedPolicyError.
    """
    if view.path == pages[-1]:
        return None
    for href in reversed(pages):
        if href in view.links and href != view.path:
            return FollowLink(href)
    raise ScriptedPolicyError(f"{view.path} has no link towards {pages[-1]}")


def next_unvisited(visited: Collection[str], view: PageLinks, *pages: str) -> FollowLink | None:
    """Like `next_link`, but visits every page of the path; None once all are visited."""
    for index, page in enumerate(pages):
        if page not in visited:
            return next_link(view, *pages[: index + 1])
    return None


_TARGET = Path(__file__).with_suffix(".js").read_text()

_READ_LINKS = """() => [location.pathname + location.search,
  [...document.querySelectorAll('a[href]')].map((a) => a.getAttribute('href'))]"""


async def read_page_links(page: Page) -> PageLinks:
    path, links = await read_page(page, _READ_LINKS)
    return PageLinks(path, frozenset(links))


async def first_action(page: Page, action: HighLevelAction) -> Action:
    """The first browser action of a high-level action. Raises ScriptedPolicyError."""
    match action:
        case GiveAnswer(text):
            return Action("answer", text=text)
        case FollowLink(href):
            return await resolve_target(page, _TARGET, {"href": href})
        case SubmitForm(path, values):
            return await resolve_target(page, _TARGET, {"action": path, "values": dict(values)})
