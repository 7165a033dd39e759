"""What the offline websites share: an HTTP application whose pages are Jinja2 templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_webrl.tasks.server import PageRequest, PageResponse
from megatron_webrl.tasks.sites.high_level_actions import FollowLink, PageLinks, SubmitForm

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip


def format_date(day: date) -> str:
    """A date such as 5 March 2026."""
    return f"{day.day} {day:%B %Y}"


_TEMPLATES.globals |= {"format_date": format_date, "zip": zip}


def build_path(path: str, /, **query: str | int) -> str:
    """A path with a query string, without empty values and page=1."""
    kept = {name: value for name, value in query.items() if value != "" and (name, value) != ("page", 1)}
    return f"{path}?{urlencode(kept)}" if kept else path


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
    accent: ClassVar[str] = "black"  # colours of the site in CSS
    ground: ClassVar[str] = "white"
    popup: ClassVar[tuple[str, str]] = ("", "")  # title and text
    template_functions: ClassVar[tuple[Callable[..., str], ...]] = ()  # that the site's template calls
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
        if request.method == "GET":
            self._current_path = build_path(request.path, **request.query)
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
        self,
        heading: str,
        page: str,
        crumbs: Sequence[tuple[str, str]] = (),
        status: int = 200,
        template: str = "",
        **values: object,
    ) -> PageResponse:
        """A page in the site's layout, with notice, cookie banner and popup.

        `page`: the macro of the body, in `template` or that of the site; `crumbs`: links above the heading.
        """  # fmt: skip
        self._views += 1
        self.visited_paths.add(self._current_path)
        functions = {function.__name__: function for function in self.template_functions}
        macros = _TEMPLATES.get_template(f"{template or self.name}.html", globals=functions).module
        html = _TEMPLATES.get_template("layout.html").render(
            app=self, heading=heading, body=getattr(macros, page)(**values), crumbs=crumbs, notice=self._notice,
            path=self._current_path,
        )  # fmt: skip
        self._notice = ""
        return PageResponse(status, html.encode(), headers={"Cache-Control": "no-store"})

    def redirect(self, path: str, notice: str = "") -> PageResponse:
        """Redirect to another page, which shows the notice."""
        self._notice = notice
        return PageResponse(303, headers={"Location": quote(path, safe="/?&=%+-_.~"), "Cache-Control": "no-store"})

    def not_found(self) -> PageResponse:
        return self.render_page("Page not found", "not_found", status=404, template="common")

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
        return self.render_page("Sign in", "login", template="common", next=local_path(request.query.get("next", "/")))

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
) -> tuple[Sequence[V], list[tuple[str, str]]]:
    """The items on the requested page of a list, and the links to its pages: label and path, empty for that page."""
    pages = page_count(len(items), per_page)
    number = request.query.get("page", "1")
    valid = number.isascii() and number.isdigit() and len(number) < 6
    page = min(max(int(number), 1), pages) if valid else 1
    numbers = [("Previous", page - 1), *((str(n), n) for n in range(1, pages + 1)), ("Next", page + 1)]
    links = [(label, build_path(path, **query, page=n) if n != page else "") for label, n in numbers if 0 < n <= pages]
    return items[(page - 1) * per_page : page * per_page], links if pages > 1 else []


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
