"""What all sites have in common: an episode's own copy of a site, its routes, sign-in, notices, and layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar
from urllib.parse import quote

from megatron_webrl.tasks.server import Reply, Request
from megatron_webrl.tasks.sites.markup import Html, address, dialog, escape, field, form, hidden, join, link, tag, text
from megatron_webrl.tasks.sites.moves import Follow, Look, Submit
from megatron_webrl.tasks.sites.style import stylesheet

Effect = tuple[str, ...]
"""Something that lasts: an order, a post, a moved appointment. Its kind, then what it consists of."""

Page = Callable[..., Reply]
P = TypeVar("P", bound=Page)
MAX_TEXT = 2000  # characters of one field


@dataclass(frozen=True)
class Account:
    """Who the agent may sign in as."""

    user: str
    password: str
    name: str


@dataclass(frozen=True)
class Start:
    """How an episode finds the site: already signed in or not, with what in its way."""

    signed_in: bool = False
    banner: bool = False  # a bar asks for consent to cookies
    popup_after: int = 0  # a box comes up with this page; 0: none


def route(method: str, pattern: str) -> Callable[[P], P]:
    """Marks a method of an App as what answers a path; groups of the pattern are its arguments."""

    def mark(page: P) -> P:
        page.route = (method, re.compile(pattern))  # type: ignore[attr-defined]
        return page

    return mark


class App:
    """One episode's copy of a site: what it shows, and what the agent has done so far.

    Calls must come one at a time. `effects` lists what lasts, in order; nothing else on the site counts.
    """

    name: ClassVar[str]  # first label of the host and key of its settings
    title: ClassVar[str]
    search_hint: ClassVar[str]
    popup: ClassVar[tuple[str, str]] = ("", "")  # title and text of the box that comes up
    members_only: ClassVar[bool] = False
    _routes: ClassVar[tuple[tuple[str, re.Pattern[str], Page], ...]] = ()

    def __init_subclass__(cls) -> None:
        own = [page for page in vars(cls).values() if hasattr(page, "route")]
        cls._routes += tuple((*page.route, page) for page in own)

    def __init__(self, account: Account, start: Start) -> None:
        self.account = account
        self.signed_in, self.banner = start.signed_in, start.banner
        self.effects: list[Effect] = []
        self.seen: set[str] = set()  # paths of pages shown, with their queries
        self._popup_after, self._popup_done = start.popup_after, not start.popup_after
        self._views = 0
        self._notice = ""
        self._here = "/"

    # Requests

    def respond(self, request: Request) -> Reply:
        """The page of a request."""
        self._here = address(request.path, **request.query) if request.method == "GET" else self._here
        if self.members_only and not self.signed_in and request.path not in ("/login", "/consent", "/dismiss"):
            return self.redirect(address("/login", next=self._here))
        for method, pattern, page in self._routes:
            found = pattern.fullmatch(request.path) if method == request.method else None
            if found:
                return page(self, request, *found.groups())
        return self.missing()

    def page(self, title: str, *body: Html, status: int = 200) -> Reply:
        """A page in the site's layout, with what the agent has to know and what is in its way."""
        self._views += 1
        self.seen.add(self._here)
        notice = tag("p", text(self._notice), css="notice") if self._notice else Html("")
        self._notice = ""
        covers = self._covers()
        html = (
            f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)} - {self.title}</title>"
            f"<link rel='icon' href='data:,'><meta name='viewport' content='width=device-width'>"
            f"<style>{stylesheet(self.name)}</style></head><body>{self._head()}"
            f"<main>{notice}{''.join(body)}</main><footer>{self.title}</footer>{covers}</body></html>"
        )
        return Reply(status, html.encode(), headers={"Cache-Control": "no-store"})

    def redirect(self, path: str, notice: str = "") -> Reply:
        """Send the browser to another page, where the notice is shown."""
        self._notice = notice
        return Reply(303, headers={"Location": quote(path, safe="/?&=%+-_.~"), "Cache-Control": "no-store"})

    def missing(self) -> Reply:
        """The page of an address that does not exist."""
        return self.page("Not found", tag("h1", text("Page not found")), link("/", "To the start page"), status=404)

    def sign_in_first(self) -> Reply | None:
        """Where visitors are sent who have to sign in; None for those who have."""
        if self.signed_in:
            return None
        return self.redirect(address("/login", next=self._here), "Please sign in to continue.")

    # Pages that every site has

    def login_page(self, request: Request) -> Reply:
        return self.page(
            "Sign in",
            tag("h1", text("Sign in")),
            form(
                "/login",
                hidden("next", local(request.query.get("next", "/"))),
                field("user", "User name"),
                field("password", "Password", kind="password"),
                button="Sign in",
                css="sheet narrow",
            ),
        )

    def login(self, request: Request) -> Reply:
        given = request.form.get("user", "").strip(), request.form.get("password", "").strip()
        if given != (self.account.user, self.account.password):
            return self.redirect("/login", "User name or password is wrong.")
        self.signed_in = True
        return self.redirect(local(request.form.get("next", "/")), f"Welcome back, {self.account.name}.")

    def logout(self, request: Request) -> Reply:
        self.signed_in = False
        return self.redirect("/", "You have signed out.")

    def consent(self, request: Request) -> Reply:
        self.banner = False
        return self.redirect(local(request.form.get("back", "/")))

    def dismiss(self, request: Request) -> Reply:
        self._popup_done = True
        return self.redirect(local(request.form.get("back", "/")))

    _routes = (
        ("GET", re.compile("/login"), login_page),
        ("POST", re.compile("/login"), login),
        ("POST", re.compile("/logout"), logout),
        ("POST", re.compile("/consent"), consent),
        ("POST", re.compile("/dismiss"), dismiss),
    )

    # Layout

    def links(self) -> tuple[tuple[str, str], ...]:
        """Address and label of what the head of every page links to."""
        return ()

    @property
    def popup_shown(self) -> bool:
        """Whether the box has come up and is still there."""
        return not self._popup_done and self._views >= self._popup_after

    def _head(self) -> Html:
        search = (
            f'<form class="search" method="get" action="/search"><input name="q" placeholder="{self.search_hint}" '
            'required><button type="submit">Search</button></form>'
        )
        if self.signed_in:
            who = join((tag("span", text(self.account.name)), form("/logout", button="Sign out", css="plain")))
        else:
            who = link("/login", "Sign in")
        menu = join(link(href, label) for href, label in self.links())
        return tag("header", link("/", self.title, "brand"), tag("nav", menu), Html(search), tag("div", who, css="who"))

    def _covers(self) -> Html:
        parts = []
        if self.banner:
            words = tag("p", text("We use cookies to keep this site working. By staying you agree to them."))
            back = hidden("back", self._here)
            parts.append(tag("div", words, form("/consent", back, button="Accept cookies"), css="banner"))
        if self.popup_shown:
            title, words_of_box = self.popup
            close = form("/dismiss", hidden("back", self._here), button="No, thanks")
            parts.append(dialog(title, tag("p", text(words_of_box)), close))
        return join(parts)


def local(path: str) -> str:
    """A path of this site, or its start page for anything else."""
    return path if re.fullmatch(r"/(?!/)[\x21-\x5b\x5d-\x7e]*", path) else "/"


def entered(request: Request, name: str) -> str:
    """What a field of a form holds, without surrounding spaces and with plain line ends."""
    return request.form.get(name, "").replace("\r\n", "\n").strip()[:MAX_TEXT]


def page_number(request: Request, pages: int) -> int:
    """The page of a list that is asked for, within what there is."""
    given = request.query.get("page", "1")
    return min(max(int(given), 1), pages) if given.isascii() and given.isdigit() and len(given) < 6 else 1


def clear_way(app: App) -> Submit | None:
    """What closes that which covers the page."""
    if app.popup_shown:
        return Submit("/dismiss")
    return Submit("/consent") if app.banner else None


def sign_in(app: App, look: Look) -> Follow | Submit | None:
    """What signs in from wherever the agent is; None once it has."""
    if app.signed_in:
        return None
    if look.path.startswith("/login"):
        return Submit("/login", {"user": app.account.user, "password": app.account.password})
    return Follow("/login")
