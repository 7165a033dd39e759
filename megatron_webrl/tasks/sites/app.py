"""What the offline websites share: HTTP application, markup, style."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlencode

from megatron_webrl.tasks.server import PageRequest, PageResponse
from megatron_webrl.tasks.sites.high_level_actions import FollowLink, PageLinks, SubmitForm

ACCENTS = {
    "shop": ("#14532d", "#f4f7f4"),
    "forum": ("#5b3a8c", "#f6f4fa"),
    "calendar": ("#0b5394", "#f3f7fb"),
    "wiki": ("#7a4b12", "#faf7f2"),
    "forms": ("#8a1f3d", "#faf5f6"),
}

_SHEET = Path(__file__).with_name("sites.css").read_text()


def stylesheet(site: str) -> str:
    accent, ground = ACCENTS[site]
    return _SHEET.replace("ACCENT", accent).replace("GROUND", ground)


class Html(str):
    """Markup. Whatever else becomes part of a page is escaped."""


def join(parts: Iterable[object]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(str(part)) for part in parts))


def tag(name: str, *children: object, css: str = "") -> Html:
    style = f' class="{escape(css)}"' if css else ""
    return Html(f"<{name}{style}>{join(children)}</{name}>")


def build_path(path: str, /, **query: str | int) -> str:
    """A path with a query string, without empty values and page=1."""
    kept = {name: value for name, value in query.items() if value != "" and (name, value) != ("page", 1)}
    return f"{path}?{urlencode(kept)}" if kept else path


def link(href: str, label: str, css: str = "") -> Html:
    style = f' class="{escape(css)}"' if css else ""
    return Html(f'<a{style} href="{escape(href)}">{escape(label)}</a>')


def form(action: str, *fields: Html, button: str, css: str = "", method: str = "post") -> Html:
    return Html(
        f'<form class="{escape(css)}" method="{method}" action="{escape(action)}" autocomplete="off">'
        f'{"".join(fields)}<button type="submit">{escape(button)}</button></form>'
    )


def hidden_field(name: str, value: str) -> Html:
    return Html(f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">')


def text_field(name: str, label: str, hint: str = "", value: str = "", kind: str = "text") -> Html:
    return Html(
        f'<label class="field"><span>{escape(label)}</span><input type="{kind}" name="{escape(name)}" '
        f'value="{escape(value)}" placeholder="{escape(hint)}" required></label>'
    )


def text_area(name: str, label: str, hint: str = "") -> Html:
    return Html(
        f'<label class="field"><span>{escape(label)}</span><textarea name="{escape(name)}" rows="4" '
        f'placeholder="{escape(hint)}" required></textarea></label>'
    )


def radio_group(name: str, label: str, options: Sequence[tuple[str, str]], chosen: str = "") -> Html:
    """Required radio buttons of (value, label)."""
    inputs = join(
        Html(
            f'<label class="choice"><input type="radio" name="{escape(name)}" value="{escape(value)}" required'
            f"{' checked' if value == chosen else ''}> {escape(caption)}</label>"
        )
        for value, caption in options
    )
    return Html(f'<fieldset class="field"><legend>{escape(label)}</legend>{inputs}</fieldset>')


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    head = join(tag("th", name) for name in heads)
    body = join(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return Html(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def definition_list(rows: Iterable[tuple[str, object]]) -> Html:
    return tag("dl", *(join((tag("dt", name), tag("dd", value))) for name, value in rows), css="facts")


def pager(path: str, page: int, pages: int, /, **query: str | int) -> Html:
    """Links to the pages of a list; empty for a single page."""
    if pages < 2:
        return Html("")
    parts = [link(build_path(path, **query, page=page - 1), "Previous")] if page > 1 else []
    for n in range(1, pages + 1):
        parts.append(tag("b", n) if n == page else link(build_path(path, **query, page=n), str(n)))
    if page < pages:
        parts.append(link(build_path(path, **query, page=page + 1), "Next"))
    return tag("nav", *parts, css="pager")


def dialog(title: str, body: Html, *buttons: Html) -> Html:
    inner = tag("div", tag("h2", title), body, tag("div", *buttons, css="buttons"), css="dialog")
    return tag("div", inner, css="veil")


def page_count(items: int, per_page: int) -> int:
    """Number of pages of a list; at least 1."""
    return max(1, -(-items // per_page))


Effect = tuple[str, ...]  # a lasting change, such as an order or a moved appointment: its kind, then its details
RouteHandler = Callable[..., PageResponse]
H = TypeVar("H", bound=RouteHandler)
K = TypeVar("K")
V = TypeVar("V")
MAX_FIELD_CHARACTERS = 2000


@dataclass(frozen=True)
class Account:
    user: str
    password: str
    name: str


@dataclass(frozen=True)
class InitialSiteState:
    """The state of a site at the start of an episode."""

    signed_in: bool = False
    cookie_banner: bool = False
    popup_after_views: int = 0  # number of page views after which a popup appears; 0: never


class ResponseInterrupt(Exception):
    """Answers a request with `response` instead of the result of its handler."""

    def __init__(self, response: PageResponse) -> None:
        self.response = response


def route(method: str, pattern: str) -> Callable[[H], H]:
    """Marks a method of an App as the handler of a path; groups of the pattern are its arguments."""

    def mark(handler: H) -> H:
        handler.route = (method, re.compile(pattern))  # type: ignore[attr-defined]
        return handler

    return mark


class App:
    """One episode's copy of a site: its pages, and the changes made by the agent. Not thread-safe."""

    name: ClassVar[str]  # first label of the host name
    title: ClassVar[str]
    search_hint: ClassVar[str]
    popup: ClassVar[tuple[str, str]] = ("", "")  # title and text
    login_required: ClassVar[bool] = False
    _routes: ClassVar[tuple[tuple[str, re.Pattern[str], RouteHandler], ...]] = ()

    def __init_subclass__(cls) -> None:
        handlers = [member for member in vars(cls).values() if hasattr(member, "route")]
        cls._routes += tuple((*handler.route, handler) for handler in handlers)

    def __init__(self, data: Any, start: InitialSiteState) -> None:
        """`data`: the content of the site, with an `account`."""
        self.data, self.account = data, data.account
        self.signed_in, self.cookie_banner = start.signed_in, start.cookie_banner
        self.effects: list[Effect] = []  # in order; only they count for the reward
        self.visited_paths: set[str] = set()  # with queries
        self._popup_after, self._popup_done = start.popup_after_views, not start.popup_after_views
        self._views = 0
        self._notice = ""
        self._current_path = "/"

    # Requests

    def handle_request(self, request: PageRequest) -> PageResponse:
        self._current_path = (
            build_path(request.path, **request.query) if request.method == "GET" else self._current_path
        )
        if self.login_required and not self.signed_in and request.path not in ("/login", "/consent", "/dismiss"):
            return self.redirect(build_path("/login", next=self._current_path))
        try:
            for method, pattern, handler in self._routes:
                match = pattern.fullmatch(request.path) if method == request.method else None
                if match:
                    return handler(self, request, *match.groups())
        except ResponseInterrupt as interrupt:
            return interrupt.response
        return self.not_found()

    def render_page(
        self, heading: str, *body: object, crumbs: Sequence[object] = (), status: int = 200
    ) -> PageResponse:
        """A page in the site's layout, with notice, cookie banner and popup. `crumbs`: above the heading."""
        self._views += 1
        self.visited_paths.add(self._current_path)
        notice = tag("p", self._notice, css="notice") if self._notice else Html("")
        path = tag("div", *crumbs, css="crumbs") if crumbs else Html("")
        self._notice = ""
        overlays = self._overlays()
        html = (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
            f"<title>{escape(heading)} - {self.title}</title>"
            f"<link rel='icon' href='data:,'><meta name='viewport' content='width=device-width'>"
            f"<style>{stylesheet(self.name)}</style></head><body>{self._header()}"
            f"<main>{notice}{path}{tag('h1', heading)}{join(body)}</main><footer>{self.title}</footer>{overlays}"
            "</body></html>"
        )
        return PageResponse(status, html.encode(), headers={"Cache-Control": "no-store"})

    def redirect(self, path: str, notice: str = "") -> PageResponse:
        """Redirect to another page, which shows the notice."""
        self._notice = notice
        return PageResponse(303, headers={"Location": quote(path, safe="/?&=%+-_.~"), "Cache-Control": "no-store"})

    def not_found(self) -> PageResponse:
        return self.render_page("Page not found", link("/", "To the start page"), status=404)

    def find(self, items: Mapping[K, V], key: K) -> V:
        """The item of a key; an unknown key interrupts with `not_found`."""
        if key not in items:
            raise ResponseInterrupt(self.not_found())
        return items[key]

    def require_login(self) -> None:
        """Interrupt with a redirect to the sign-in page unless the agent has signed in."""
        if not self.signed_in:
            login = build_path("/login", next=self._current_path)
            raise ResponseInterrupt(self.redirect(login, "Please sign in to continue."))

    def complete(self, effect: Effect, path: str, notice: str = "") -> PageResponse:
        """Record an effect, then redirect."""
        self.effects.append(effect)
        return self.redirect(path, notice)

    # Pages of every site

    def login_page(self, request: PageRequest) -> PageResponse:
        return self.render_page(
            "Sign in",
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
        credentials = request.form.get("user", "").strip(), request.form.get("password", "").strip()
        if credentials != (self.account.user, self.account.password):
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
        """Path and label of the links in the header of every page."""
        return ()

    @property
    def is_popup_shown(self) -> bool:
        """Whether the popup has appeared and is still open."""
        return not self._popup_done and self._views >= self._popup_after

    def _header(self) -> Html:
        search = (
            f'<form class="search" method="get" action="/search"><input name="q" placeholder="{self.search_hint}" '
            'required><button type="submit">Search</button></form>'
        )
        if self.signed_in:
            user = join((tag("span", self.account.name), form("/logout", button="Sign out", css="plain")))
        else:
            user = link("/login", "Sign in")
        nav = join(link(href, label) for href, label in self.navigation_links())
        return tag("header", link("/", self.title, "brand"), tag("nav", nav), Html(search), tag("div", user, css="who"))

    def _overlays(self) -> Html:
        parts = []
        if self.cookie_banner:
            message = tag("p", "We use cookies to keep this site working. By staying you agree to them.")
            back = hidden_field("back", self._current_path)
            parts.append(tag("div", message, form("/consent", back, button="Accept cookies"), css="banner"))
        if self.is_popup_shown:
            title, message_text = self.popup
            close = form("/dismiss", hidden_field("back", self._current_path), button="No, thanks")
            parts.append(dialog(title, tag("p", message_text), close))
        return join(parts)


def local_path(path: str) -> str:
    """The path, if it is one of this site; else the start page."""
    return path if re.fullmatch(r"/(?!/)[\x21-\x5b\x5d-\x7e]*", path) else "/"


def form_text(request: PageRequest, name: str) -> str:
    """The value of a form field, stripped and with \\n as line end."""
    return request.form.get(name, "").replace("\r\n", "\n").strip()[:MAX_FIELD_CHARACTERS]


def query_text(request: PageRequest) -> str:
    return request.query.get("q", "").strip()


def matches_query(request: PageRequest, title: str) -> bool:
    """Whether a title contains every word of the search text, which is not empty."""
    words = query_text(request).lower().split()
    return bool(words) and all(word in title.lower() for word in words)


def search_paths(title: str) -> tuple[str, ...]:
    """Paths of searches that find a title: by all of its words, or by one of them."""
    return tuple(build_path("/search", q=words) for words in dict.fromkeys((title, *title.split())))


def paginate(
    request: PageRequest, items: Sequence[V], per_page: int, path: str, /, **query: str
) -> tuple[Sequence[V], Html]:
    """The items on the requested page of a list, and the links to its pages."""
    pages = page_count(len(items), per_page)
    number = request.query.get("page", "1")
    valid = number.isascii() and number.isdigit() and len(number) < 6
    page = min(max(int(number), 1), pages) if valid else 1
    return items[(page - 1) * per_page : page * per_page], pager(path, page, pages, **query)


def close_overlay(app: App) -> SubmitForm | None:
    """The action that closes the popup or cookie banner; None if neither is shown."""
    if app.is_popup_shown:
        return SubmitForm("/dismiss")
    return SubmitForm("/consent") if app.cookie_banner else None


def sign_in(app: App, view: PageLinks) -> FollowLink | SubmitForm | None:
    """The next action to sign in; None if the agent has signed in."""
    if app.signed_in:
        return None
    if view.path.startswith("/login"):
        return SubmitForm("/login", {"user": app.account.user, "password": app.account.password})
    return FollowLink("/login")
