"""What all sites have in common: an episode's own copy of a site, its routes, sign-in, notices, and layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar
from urllib.parse import quote

from megatron_webrl.tasks.server import PageRequest, PageResponse
from megatron_webrl.tasks.sites.high_level_actions import FollowLink, PageLinks, SubmitForm
from megatron_webrl.tasks.sites.markup import (
    Html,
    build_path,
    dialog,
    escape,
    form,
    hidden_field,
    join,
    link,
    tag,
    text,
    text_field,
)
from megatron_webrl.tasks.sites.style import stylesheet

Effect = tuple[str, ...]
"""Something that lasts: an order, a post, a moved appointment. Its kind, then what it consists of."""

RouteHandler = Callable[..., PageResponse]
P = TypeVar("P", bound=RouteHandler)
MAX_FIELD_CHARACTERS = 2000  # characters of one field


@dataclass(frozen=True)
class Account:
    """Who the agent may sign in as."""

    user: str
    password: str
    name: str


@dataclass(frozen=True)
class InitialSiteState:
    """How an episode finds the site: already signed in or not, with what in its way."""

    signed_in: bool = False
    cookie_banner: bool = False  # a bar asks for consent to cookies
    popup_after_views: int = 0  # a box comes up with this page; 0: none


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
    login_required: ClassVar[bool] = False
    _routes: ClassVar[tuple[tuple[str, re.Pattern[str], RouteHandler], ...]] = ()

    def __init_subclass__(cls) -> None:
        own = [page for page in vars(cls).values() if hasattr(page, "route")]
        cls._routes += tuple((*page.route, page) for page in own)

    def __init__(self, account: Account, start: InitialSiteState) -> None:
        self.account = account
        self.signed_in, self.cookie_banner = start.signed_in, start.cookie_banner
        self.effects: list[Effect] = []
        self.visited_paths: set[str] = set()  # paths of pages shown, with their queries
        self._popup_after, self._popup_done = start.popup_after_views, not start.popup_after_views
        self._views = 0
        self._notice = ""
        self._here = "/"

    # Requests

    def handle_request(self, request: PageRequest) -> PageResponse:
        """The page of a request."""
        self._here = build_path(request.path, **request.query) if request.method == "GET" else self._here
        if self.login_required and not self.signed_in and request.path not in ("/login", "/consent", "/dismiss"):
            return self.redirect(build_path("/login", next=self._here))
        for method, pattern, page in self._routes:
            found = pattern.fullmatch(request.path) if method == request.method else None
            if found:
                return page(self, request, *found.groups())
        return self.not_found()

    def render_page(self, title: str, *body: Html, status: int = 200) -> PageResponse:
        """A page in the site's layout, with what the agent has to know and what is in its way."""
        self._views += 1
        self.visited_paths.add(self._here)
        notice = tag("p", text(self._notice), css="notice") if self._notice else Html("")
        self._notice = ""
        covers = self._covers()
        html = (
            f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)} - {self.title}</title>"
            f"<link rel='icon' href='data:,'><meta name='viewport' content='width=device-width'>"
            f"<style>{stylesheet(self.name)}</style></head><body>{self._head()}"
            f"<main>{notice}{''.join(body)}</main><footer>{self.title}</footer>{covers}</body></html>"
        )
        return PageResponse(status, html.encode(), headers={"Cache-Control": "no-store"})

    def redirect(self, path: str, notice: str = "") -> PageResponse:
        """Send the browser to another page, where the notice is shown."""
        self._notice = notice
        return PageResponse(303, headers={"Location": quote(path, safe="/?&=%+-_.~"), "Cache-Control": "no-store"})

    def not_found(self) -> PageResponse:
        """The page of an address that does not exist."""
        return self.render_page(
            "Not found", tag("h1", text("Page not found")), link("/", "To the start page"), status=404
        )

    def redirect_to_login(self) -> PageResponse | None:
        """Where visitors are sent who have to sign in; None for those who have."""
        if self.signed_in:
            return None
        return self.redirect(build_path("/login", next=self._here), "Please sign in to continue.")

    # Pages that every site has

    def login_page(self, request: PageRequest) -> PageResponse:
        return self.render_page(
            "Sign in",
            tag("h1", text("Sign in")),
            form(
                "/login",
                hidden_field("next", local_path(request.query.get("next", "/"))),
                text_field("user", "User name"),
                text_field("password", "Password", kind="password"),
                button="Sign in",
                css="sheet narrow",
            ),
        )

    def login(self, request: PageRequest) -> PageResponse:
        given = request.form.get("user", "").strip(), request.form.get("password", "").strip()
        if given != (self.account.user, self.account.password):
            return self.redirect("/login", "User name or password is wrong.")
        self.signed_in = True
        return self.redirect(local_path(request.form.get("next", "/")), f"Welcome back, {self.account.name}.")

    def logout(self, request: PageRequest) -> PageResponse:
        self.signed_in = False
        return self.redirect("/", "You have signed out.")

    def accept_cookies(self, request: PageRequest) -> PageResponse:
        self.cookie_banner = False
        return self.redirect(local_path(request.form.get("back", "/")))

    def dismiss_popup(self, request: PageRequest) -> PageResponse:
        self._popup_done = True
        return self.redirect(local_path(request.form.get("back", "/")))

    _routes = (
        ("GET", re.compile("/login"), login_page),
        ("POST", re.compile("/login"), login),
        ("POST", re.compile("/logout"), logout),
        ("POST", re.compile("/consent"), accept_cookies),
        ("POST", re.compile("/dismiss"), dismiss_popup),
    )

    # Layout

    def navigation_links(self) -> tuple[tuple[str, str], ...]:
        """Address and label of what the head of every page links to."""
        return ()

    @property
    def is_popup_shown(self) -> bool:
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
        menu = join(link(href, label) for href, label in self.navigation_links())
        return tag("header", link("/", self.title, "brand"), tag("nav", menu), Html(search), tag("div", who, css="who"))

    def _covers(self) -> Html:
        parts = []
        if self.cookie_banner:
            words = tag("p", text("We use cookies to keep this site working. By staying you agree to them."))
            back = hidden_field("back", self._here)
            parts.append(tag("div", words, form("/consent", back, button="Accept cookies"), css="banner"))
        if self.is_popup_shown:
            title, words_of_box = self.popup
            close = form("/dismiss", hidden_field("back", self._here), button="No, thanks")
            parts.append(dialog(title, tag("p", text(words_of_box)), close))
        return join(parts)


def local_path(path: str) -> str:
    """A path of this site, or its start page for anything else."""
    return path if re.fullmatch(r"/(?!/)[\x21-\x5b\x5d-\x7e]*", path) else "/"


def form_text(request: PageRequest, name: str) -> str:
    """What a field of a form holds, without surrounding spaces and with plain line ends."""
    return request.form.get(name, "").replace("\r\n", "\n").strip()[:MAX_FIELD_CHARACTERS]


def page_number(request: PageRequest, pages: int) -> int:
    """The page of a list that is asked for, within what there is."""
    given = request.query.get("page", "1")
    return min(max(int(given), 1), pages) if given.isascii() and given.isdigit() and len(given) < 6 else 1


def close_overlay(app: App) -> SubmitForm | None:
    """What closes that which covers the page."""
    if app.is_popup_shown:
        return SubmitForm("/dismiss")
    return SubmitForm("/consent") if app.cookie_banner else None


def sign_in(app: App, look: PageLinks) -> FollowLink | SubmitForm | None:
    """What signs in from wherever the agent is; None once it has."""
    if app.signed_in:
        return None
    if look.path.startswith("/login"):
        return SubmitForm("/login", {"user": app.account.user, "password": app.account.password})
    return FollowLink("/login")
