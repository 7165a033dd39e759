"""A minimal HTTP client of one offline website: it keeps the cookie that it gets, and solves tasks."""

from __future__ import annotations

import http.client
from urllib.parse import urlencode

from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, HighLevelAction
from megatron_webrl.tasks.sites.questions import WebsiteGoal
from megatron_webrl.tasks.sites.website_server import VISITOR_COOKIE, OfflineWebsites, Visitor
from tests.tasks.site_client import MAX_MOVES, Client


class VisitorClient(Client):
    """A visitor of the host of a task, at its start page."""

    def __init__(self, websites: OfflineWebsites, wanted: WebsiteGoal, start: bool = True) -> None:
        self._websites, self._host, self._secret = websites, wanted.host, ""
        self._address = websites.addresses[f"{wanted.host.partition('-')[0]}-*.localhost"]
        self.wanted = wanted
        self.pages: list[str] = []  # paths of pages shown, in order
        if start:
            self.go(wanted.goal.start_path)

    @property
    def visitor(self) -> Visitor:
        return self._websites._visitors[self._secret]

    def fetch(self, path: str, form: dict[str, str] | None = None) -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection(self._address, timeout=20)
        headers = {"Host": self._host} | ({"Cookie": f"{VISITOR_COOKIE}={self._secret}"} if self._secret else {})
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        if form is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, urlencode(form), headers | kind)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        if cookie := answer.headers.get("Set-Cookie"):
            name, _, value = cookie.partition(";")[0].partition("=")
            assert name == VISITOR_COOKIE
            self._secret = value
        if answer.status != 303:
            self.pages.append(path)
        return answer.status, answer.headers, body

    def next_move(self) -> HighLevelAction:
        return self.visitor.next_move(self.wanted.goal.scripted_policy, self.view)

    def solve(self) -> str:
        """Run the script to its answer."""
        for _ in range(MAX_MOVES):
            move = self.next_move()
            if isinstance(move, GiveAnswer):
                return move.text
            self.do(move)
        raise AssertionError(f"the script has not ended after {MAX_MOVES} moves, on {self.path}")
