"""A minimal HTTP client of the sites: it loads pages, follows links, submits forms, and solves tasks."""

from __future__ import annotations

import http.client
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urlencode

from megatron_webrl.tasks.sites.goal import Goal
from megatron_webrl.tasks.sites.high_level_actions import FollowLink, GiveAnswer, HighLevelAction, PageLinks, SubmitForm
from megatron_webrl.tasks.sites.site_task_source import SESSION_COOKIE, SiteEpisode, site_host

MAX_MOVES = 40


@dataclass
class Form:
    action: str
    method: str
    values: dict[str, str] = field(default_factory=dict)  # as they stand
    options: dict[str, list[str]] = field(default_factory=dict)  # of radio buttons
    lines: list[str] = field(default_factory=list)  # names of text fields
    buttons: int = 0


class PageParser(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.forms: list[Form] = []
        self.outside: list[str] = []  # addresses of other places
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag == "a":
            self.links.append(given["href"])
        self.outside += [v for n, v in given.items() if n in ("href", "src", "action") and "://" in v]
        if tag == "form":
            self.forms.append(Form(given["action"], given["method"]))
        elif tag == "button":
            self.forms[-1].buttons += 1
        elif tag == "textarea" or (tag == "input" and given.get("type") != "radio"):
            self.forms[-1].values[given["name"]] = given.get("value", "")
            if given.get("type") != "hidden":
                self.forms[-1].lines.append(given["name"])
        elif tag == "input":
            self.forms[-1].options.setdefault(given["name"], []).append(given["value"])
            if "checked" in given:
                self.forms[-1].values[given["name"]] = given["value"]

    def handle_data(self, data: str) -> None:
        self.text += data


class Client:
    """The client of one episode, or of one visit: it keeps a cookie that it gets. Raises AssertionError if a link or
    form does not exist.
    """

    def __init__(self, address: str, episode: SiteEpisode) -> None:
        self.episode = self.visit = episode
        self._connect(address, site_host(episode.site), f"{SESSION_COOKIE}={episode.secret}", episode.goal)

    def _connect(self, address: str, host: str, cookie: str, goal: Goal) -> None:
        self._address, self.host, self.cookie, self.goal = address, host, cookie, goal
        self.go(goal.start_path)

    def go(self, path: str, form: dict[str, str] | None = None) -> None:
        """Load a page or submit a form, and follow redirects."""
        for _ in range(5):
            self.status, headers, self.html = self.fetch(path, form)
            self.path, form = path, None
            if self.status != 303:
                break
            path = headers["Location"]
        else:
            raise AssertionError(f"{path} leads from page to page")
        self.page = PageParser(self.html)

    def fetch(self, path: str, form: dict[str, str] | None = None) -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection(self._address, timeout=20)
        headers = {"Host": self.host} | ({"Cookie": self.cookie} if self.cookie else {})
        if form is None:
            connection.request("GET", path, headers=headers)
        else:
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            connection.request("POST", path, urlencode(form), headers | kind)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        self.cookie = answer.headers.get("Set-Cookie", self.cookie).partition(";")[0]
        return answer.status, answer.headers, body

    def do(self, move: FollowLink | SubmitForm) -> None:
        if isinstance(move, FollowLink):
            assert move.href in self.page.links, f"{self.path} has no link to {move.href}"
            return self.go(move.href)
        found = [form for form in self.page.forms if form.action == move.action]
        assert found, f"{self.path} has no form for {move.action}"
        form = found[0]
        for name, value in move.values.items():
            assert name in form.lines or value in form.options.get(name, []), f"{name}={value} cannot be filled in"
        values = form.values | dict(move.values)
        return self.go(f"{move.action}?{urlencode(values)}") if form.method == "get" else self.go(move.action, values)

    def next_move(self) -> HighLevelAction:
        view = PageLinks(self.path, frozenset(self.page.links))
        return self.visit.next_move(self.goal.scripted_policy, view)

    def solve(self) -> str | None:
        for _ in range(MAX_MOVES):
            if isinstance(self.visit, SiteEpisode) and self.visit.result() != (None, False):
                return None
            move = self.next_move()
            if isinstance(move, GiveAnswer):
                return move.text
            self.do(move)
        raise AssertionError(f"the script has not ended after {MAX_MOVES} moves, on {self.path}")
