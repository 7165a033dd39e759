"""Offline websites without a browser: hosts, visitors, refusals, tasks that scripts solve, the bar code of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from megatron_webrl.browser.server.protocol import InvalidRequest, ResetRequest
from megatron_webrl.browser.server.task_catalog import TaskCatalog
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.tasks import LatencyConfig, TasksConfig, tasks_config
from megatron_webrl.tasks.sites import website_server as module
from megatron_webrl.tasks.sites.questions import DONE_ANSWER, WebsiteGoal, website_goals
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SITE_APPS, SiteTaskSource
from megatron_webrl.tasks.sites.website_server import VISITOR_COOKIE, OfflineWebsites, Visitor
from megatron_webrl.tasks.sites.websites import (
    DENYING_NUMBERS,
    MOODY_NUMBERS,
    BarCode,
    draw_bar_code,
    effects_digest,
    get_website,
    is_offline_host,
    offline_host,
    page_digest,
    page_key_of_path,
    website_host,
)
from megatron_webrl.types import Task
from tests.tasks.site_client import Client

SIGNED_OUT, SIGNED_IN = "calendar-0.localhost", "calendar-1.localhost"


@pytest.fixture(scope="module")
def websites() -> Iterator[OfflineWebsites]:
    served = OfflineWebsites()
    yield served
    served.close()


class VisitorClient(Client):
    """A visitor of the host of a task, at its start page."""

    def __init__(self, websites: OfflineWebsites, wanted: WebsiteGoal) -> None:
        self._websites = websites
        self.pages: list[str] = []  # shown, in order
        self._connect(websites.addresses[f"{wanted.host.partition('-')[0]}-*.localhost"], wanted.host, "", wanted.goal)

    @property
    def visit(self) -> Visitor:
        return self._websites._visitors[self.cookie.removeprefix(f"{VISITOR_COOKIE}=")]

    def go(self, path: str, form: dict[str, str] | None = None) -> None:
        super().go(path, form)
        self.pages.append(self.path)


def goal_of(host: str, kind: str) -> WebsiteGoal:
    return next(goal for goal in website_goals(host).values() if goal.kind == kind)


def code_in(html: str) -> str:
    return re.findall(r'<svg aria-hidden="true".*?</svg>', html)[-1]


def drawn(host: str, path: str, *effects: tuple[str, ...], denied: bool = False) -> str:
    return draw_bar_code(BarCode(page_digest(page_key_of_path(host, path)), effects_digest(effects), denied))


def test_hosts_are_a_site_and_a_number() -> None:
    assert website_host("wiki", 17) == "wiki-17.localhost"
    assert all(is_offline_host(website_host(site, number)) for site in SITE_APPS for number in (0, 7, 9999))
    others = ("shop.localhost", "shop-.localhost", "shop-01.localhost", "shop-10000.localhost", "bank-1.localhost",
              "shop-1.localhost.example", "a.shop-1.localhost", "shop-1.example", "Shop-1.localhost", "")  # fmt: skip
    assert not [host for host in others if is_offline_host(host)]
    assert offline_host("http://SHOP-1.localhost:80/cart?x=1") == "shop-1.localhost"
    wrong = ("https://shop-1.localhost/", "http://shop-1.localhost:81/", "http://shop-1.localhost:x/",
             "shop-1.localhost", "http://user@a.example/shop-1.localhost", None)  # fmt: skip
    assert not [url for url in wrong if offline_host(url)]
    with pytest.raises(ValueError, match=r"10000 is not within 0\.\.9999"):
        website_host("wiki", 10_000)
    with pytest.raises(KeyError):
        get_website("shop.localhost")


def test_a_host_decides_content_and_tasks() -> None:
    one, goals = get_website("forum-3.localhost"), website_goals("forum-3.localhost")
    get_website.cache_clear()
    website_goals.cache_clear()
    again = get_website("forum-3.localhost")
    assert again is not one
    assert (again.data, again.start) == (one.data, one.start)
    assert list(website_goals("forum-3.localhost")) == list(goals)
    assert get_website("forum-4.localhost").data != one.data
    instructions = [text for number in range(20) for text in website_goals(f"forum-{number}.localhost")]
    assert len(set(instructions)) == len(instructions)


@pytest.mark.parametrize("host", [*(website_host(site, 0) for site in SITE_APPS), SIGNED_IN])
def test_the_scripts_of_a_website_see_what_their_facts_need(websites: OfflineWebsites, host: str) -> None:
    for wanted in website_goals(host).values():
        client = VisitorClient(websites, wanted)
        if (host, wanted.kind) == (SIGNED_OUT, "calendar-find-time"):
            assert client.path.startswith("/login")
            assert "Sign in as" in wanted.goal.instruction
        assert client.solve() == wanted.answer
        goal, visited = wanted.goal, {page_key_of_path(host, path) for path in client.pages}
        assert goal.facts
        assert effects_digest(client.visit.app.effects) == effects_digest(goal.effects)
        assert wanted.answer == (goal.answer or DONE_ANSWER)
        for fact in goal.facts:
            assert not fact.shown_on or visited & {page_key_of_path(host, path) for path in fact.shown_on}, fact


def test_visitors_have_their_own_copies_and_cookies_count_where_they_were_set(websites: OfflineWebsites) -> None:
    wanted = goal_of("wiki-0.localhost", "wiki-correct-fact")
    one, other = VisitorClient(websites, wanted), VisitorClient(websites, wanted)
    assert one.cookie != other.cookie
    assert one.solve() == DONE_ANSWER
    assert other.visit.app.effects == []
    assert code_in(one.html) == drawn(wanted.host, one.path, *wanted.goal.effects)
    assert code_in(other.html) == drawn(wanted.host, wanted.goal.start_path)
    shop = VisitorClient(websites, goal_of("shop-0.localhost", "shop-find-price"))
    other.cookie = shop.cookie
    other.go("/")
    assert other.cookie != shop.cookie
    assert "Island Almanac" in other.html
    other.host = "nowhere-1.localhost"
    assert other.fetch("/")[0] == 404


def test_the_visitor_that_is_idle_longest_is_forgotten_and_pages_can_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VISITORS", 3)
    served = OfflineWebsites(LatencyConfig(median_seconds=0.01, sigma=0.0))
    wanted = goal_of("shop-0.localhost", "shop-save-item")
    first, second, third = clients = [VisitorClient(served, wanted) for _ in range(3)]
    cookies = [client.cookie for client in clients]
    first.go("/")  # the second is idle longest
    VisitorClient(served, wanted)
    for client in (first, third, second):
        client.go("/")
    assert [client.cookie == cookie for client, cookie in zip(clients, cookies, strict=True)] == [True, False, True]
    page = served._respond(module.PageRequest("GET", "wiki-0.localhost", "/", {}, {}, {}))
    assert page.delay == pytest.approx(0.01)
    served.close()


def test_some_websites_deny_access(websites: OfflineWebsites) -> None:
    denying = website_host("shop", DENYING_NUMBERS.start)
    client = VisitorClient(websites, goal_of(denying, "shop-find-price"))
    for path in ("/", "/nothing"):
        client.go(path)
        assert (client.status, code_in(client.html)) == (403, drawn(denying, path, denied=True))
    assert client.fetch("/login", {"user": "a"})[0] == 403


def test_moody_websites_deny_access_to_half_of_their_visitors_for_good() -> None:
    served, denied = OfflineWebsites(), []
    wanted = goal_of(website_host("forms", MOODY_NUMBERS.start), "forms-find-fee")
    for _ in range(40):
        client = VisitorClient(served, wanted)
        denied.append(client.status == 403)
        client.go("/")
        assert (client.status == 403) == denied[-1]
    served.close()
    assert 10 <= sum(denied) <= 30


def test_the_bar_code_is_on_every_page_of_these_hosts_only(websites: OfflineWebsites) -> None:
    wanted = goal_of("forms-0.localhost", "forms-find-fee")
    client = VisitorClient(websites, wanted)
    for path in ("/", "/poll", "/search?q=permit", "/nothing"):
        client.go(path)
        assert code_in(client.html) == drawn(wanted.host, path)
        assert client.html.endswith("</svg></body></html>")
    with SiteTaskSource(list(ENVIRONMENTS), TasksConfig(max_steps=5)) as source:
        episode = source.start_episode(source.make_task("forms-find-fee", 0))
        page = episode.handle_request(module.PageRequest("GET", "forms.localhost", "/", {}, {}, {}))
        assert b"<svg" not in page.body


def test_a_catalog_opens_what_its_settings_permit() -> None:
    offline, far = "http://shop-1.localhost/", "http://a.example/"
    for open_web, websites in ((False, True), (True, True), (False, False)):
        config = Config(browser=BrowserConfig(open_web=open_web), tasks=tasks_config(offline_websites=websites))
        catalog = TaskCatalog.from_config(config)
        for url, permitted, setting in (
            (offline, websites, "tasks.offline_websites"),
            (far, open_web, "browser.open_web"),
        ):
            request = ResetRequest(Task("x", "web", "page", 0, 1, url=url))
            if permitted:
                assert catalog.resolve_task(request) is request.task
            else:
                with pytest.raises(InvalidRequest, match=rf"^task.url: .*; start (it|the server) with {setting}=true$"):
                    catalog.resolve_task(request)
        catalog.close()
        if catalog.web is not None:
            with pytest.raises(RuntimeError, match="was closed"):
                _ = catalog.web.addresses


def test_neighbouring_pages_and_effects_have_other_digests_and_spellings_of_one_the_same() -> None:
    host = "shop-1.localhost"
    paths = ["/", "/cart", "/item/100", "/item/101", "/category/bath", "/category/bath?page=2", "/search?q=kite"]
    digests = {page_digest(page_key_of_path(at, path)) for at in (host, "shop-2.localhost") for path in paths}
    assert len(digests) == 2 * len(paths)
    orders = [("order", "guest", way, f"101 x {n}") for way in ("standard", "express") for n in range(1, 9)]
    assert len({effects_digest([order]) for order in orders}) == len(orders)
    save, like = ("save", "1"), ("like", "1")
    assert effects_digest([save, like]) == effects_digest([like, save])
    assert len({effects_digest(done) for done in ([], [save], [save, save], [save, like])}) == 4
    assert effects_digest([]) == 0
    for one, other in (
        ("/category/bath", "/category/bath?page=1&sort="),
        ("/search?q=Slate+Kite", "/search?q=%20slate%20%20kite"),
        ("/x?a=1&b=2", "/x?b=2&a=1"),
    ):
        assert page_key_of_path(host, one) == page_key_of_path(host, other)
