"""A minimal HTTP client of the sites: it loads pages, follows links and submits forms."""

from __future__ import annotations

import http.client
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urlencode

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
    """The client of one episode. Raises AssertionError if a link or form does not exist."""

    def __init__(self, address: str, episode: SiteEpisode) -> None:
        self._address, self._host, self._secret = address, site_host(episode.site), episode.secret
        self.episode = episode
        self.go(episode.goal.start_path)

    def go(self, path: str, form: dict[str, str] | None = None) -> None:
        """Load a page or submit a form, and follow redirects."""
        for _ in range(5):
            status, headers, self.html = self.fetch(path, form)
            self.status, self.path, form = status, path, None
            if status != 303:
                break
            path = headers["Location"]
        else:
            raise AssertionError(f"{path} leads from page to page")
        self.page = PageParser(self.html)

    def fetch(self, path: str, form: dict[str, str] | None = None) -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection(self._address, timeout=20)
        headers = {"Host": self._host, "Cookie": f"{SESSION_COOKIE}={self._secret}"}
        if form is None:
            connection.request("GET", path, headers=headers)
        else:
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            connection.request("POST", path, urlencode(form), headers | kind)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
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

    @property
    def view(self) -> PageLinks:
        return PageLinks(self.path, frozenset(self.page.links))

    def next_move(self) -> HighLevelAction:
        return self.episode.next_move(self.episode.goal.scripted_policy, self.view)

    def solve(self) -> str | None:
        """Run the scripted policy to the end of the episode; returns its answer, if any."""
        for _ in range(MAX_MOVES):
            if self.episode.result() != (None, False):
                return None
            move = self.next_move()
            if isinstance(move, GiveAnswer):
                return move.text
            self.do(move)
        raise AssertionError(f"the script has not ended after {MAX_MOVES} moves, on {self.path}")
